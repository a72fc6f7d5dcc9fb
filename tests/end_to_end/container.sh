#!/bin/bash
# A container without a container engine: exec "$@" as process 1 of a process name space, as a user that nobody knows,
# without capabilities, where nothing can be written but to the folder $1 (it works in another), and /dev/shm has 64 KiB.
# Called by: unshare --user --map-user=54321 --map-group=54321 --keep-caps --mount --pid --fork --kill-child
set -euo pipefail
writable=$1
shift
mount -t proc proc /proc
mount --bind "$writable" "$writable"
while read -r _ _ _ _ target options _; do
    target=$(printf '%b' "$target")
    case $target in
        "$writable" | /proc | /proc/* | /dev/pts) continue ;;
    esac
    # What is hidden below another one can't be reached, and need not be changed.
    mount -o "remount,bind,ro,${options#r[ow],}" "$target" 2> /dev/null || [[ $target != / ]]
done < /proc/self/mountinfo
mount -t tmpfs -o size=64k tmpfs /dev/shm
unset HOME USER LOGNAME
cd / # where nothing can be written
exec setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs "$@"
