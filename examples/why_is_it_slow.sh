#!/bin/sh
# Two schedulers on a model of one's own: which is faster, where its time goes, and a page of it all.
#
#     examples/why_is_it_slow.sh FOLDER [examples/own_model.py:build] [more options of testbed sweep]
#
# FOLDER is made. Every run records what each rank does in its measured steps (--timeline).
set -eu
here=$(dirname "$0")
folder=${1:?give a folder that is not there yet}
workload=${2:-$here/own_model.py:build:width=512}
shift
[ $# -eq 0 ] || shift

testbed sweep --workload "$workload" --backend zmq-ps --workers 2 --steps 30 \
    --scheduler wfbp,bucket --repeats 3 --timeline --output "$folder" "$@"

# The same runs as one page that opens from disk, with the lanes of all ranks in it.
testbed report "$folder" --format html -o "$folder/report.html"

# Why: each exposed millisecond of every run's steps, with its cause, and what would help.
for timeline in "$folder"/cells/*.timeline.json; do
    printf '\n== %s\n' "${timeline%.timeline.json}.json"
    testbed why "${timeline%.timeline.json}.json" --tensors 5
done
printf '\npage: %s\ntimelines, for https://ui.perfetto.dev or speedscope: %s\n' \
    "$folder/report.html" "$folder/cells/*.timeline.json"
