# Inside a cluster: a stream from node $1 to node $2 of $3 bytes; what the receiver printed goes out.
# $4 is Python, $5 the folder of this file; $6 changes of the links must have happened before.
while [ "$(grep -c '"at_s"' "$TESTBED_CLUSTER")" -lt "${6:-0}" ]; do sleep 0.1; done
ready=$(mktemp)
$TESTBED_ENTER "node$2" "$4" "$5/stream.py" receive 7001 "$3" > "$ready" &
receiver=$!
until grep -q listening "$ready"; do kill -0 $receiver || exit 1; sleep 0.1; done
$TESTBED_ENTER "node$1" "$4" "$5/stream.py" send "node$2" 7001 "$3" || exit 1
wait $receiver
tail -n 1 "$ready"
rm "$ready"
