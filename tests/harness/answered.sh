# Inside a cluster: runs command line $1 on node 2, and once it says `listening` the rest here, on node 1.
ready=$(mktemp)
$TESTBED_ENTER node2 "$1" > "$ready" &
answers=$!
until grep -q listening "$ready"; do kill -0 $answers || exit 1; sleep 0.1; done
shift
"$@" || exit 1
wait $answers
rm "$ready"
