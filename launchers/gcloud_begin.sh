# Sourced by gcloud_gpu.sh and gcloud_tpu.sh, which define `create NAME OPTION...`, `on COMMAND MACHINE...`, `removal`
# (the command that deletes all machines) and the variables in capitals.
# shellcheck shell=bash
names=() making=()
make() { # make NAME OPTION...: begins to create a machine; `made` waits for all
    create "$@" </dev/null &
    names+=("$1") making+=("$!")
}
made() {
    local number failed=()
    for number in "${!making[@]}"; do
        wait "${making[number]}" || failed+=("${names[number]}")
    done
    [ ${#failed[@]} -eq 0 ] && return
    echo "these machines could not be created, for the reasons above: ${failed[*]}. The others cost money already:" >&2
    echo "run this script again to create what is missing, or delete all that exist: $(removal)" >&2
    exit 1
}
begin() { # begin CONFIG RANK MACHINES HEAD MACHINE...: waits for the machine, copies what it needs, starts its agent
    local config=$1 own=areal-jax/$NAME end=$((SECONDS + 900)) launchers words
    launchers=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    words=$(printf '%q ' "$2" "$3" "$4" "$VOLUME" "$RUN" "$SETUP")
    shift 4
    until on true "$@" </dev/null 2>/dev/null; do
        [ "$SECONDS" -lt "$end" ] || { echo "$1 did not answer by ssh for 900 s; check the VM and the firewall, run this again" >&2; exit 1; }
        sleep 10
    done
    (
        umask 077
        stage=$(mktemp -d)
        trap 'rm -r "$stage"' EXIT
        cp "$config" "$stage/config.yaml"
        cp "$launchers/gcloud_node.sh" "$stage"
        [ -z "${AREAL_JAX_SECRET:-}" ] || printf '%s' "$AREAL_JAX_SECRET" >"$stage/secret"
        tar --create --file=- --directory="$stage" . |
            on "umask 077; mkdir -p $own && tar --extract --directory=$own --file=-" "$@"
    )
    on "bash $own/gcloud_node.sh $words" "$@" </dev/null
}
