# Runs a command as nobody, who can read this Python wherever root keeps it.
#
#     unshare -m --propagation private sh as_nobody.sh "HIDDEN..." "NEEDED..." COMMAND...
#
# Folders that nobody may not enter (HIDDEN) are covered in this mount namespace alone, and what a
# command needs from below them (NEEDED) is shown there again. Paths hold no blanks.
set -e
hidden=$1 needed=$2
shift 2
kept=$(mktemp -d)
number=0
for folder in $needed; do
    number=$((number + 1))
    mkdir "$kept/$number"
    mount --bind "$folder" "$kept/$number"
done
for folder in $hidden; do
    mount -t tmpfs -o mode=0755 tmpfs "$folder"
done
number=0
for folder in $needed; do
    number=$((number + 1))
    mkdir -p "$folder"
    mount --bind "$kept/$number" "$folder"
    umount "$kept/$number"
done
rm -r "$kept"
exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"
