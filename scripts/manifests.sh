#!/usr/bin/env bash
# Checks the manifests in contrib/ against the schemas of Kubernetes and of compose files, and runs the cluster of contrib/cluster/ in
# namespaces: scripts/manifests.py, in a virtual environment, target/manifests-venv.
#
#   scripts/manifests.sh BINARY
. "$(dirname "$0")/lib.sh"

requirements=scripts/manifests-requirements.txt
# The module that has the schema of compose files.
COMPOSE=github.com/compose-spec/compose-go/v2@v2.16.2

binary=$(realpath "${1:?BINARY}")
python=$(virtual_environment target/manifests-venv "$requirements")

validate() { "${python%/python}/kubernetes-validate" --strict --quiet --kubernetes-version "$1" "$2"; }

# A misspelt key is refused, so the schemas are in force.
wrong=$(mktemp --suffix .yaml)
trap 'rm -f "$wrong"' EXIT
sed 's/replicas:/replica:/' contrib/kubernetes/millrace-relay.yaml >"$wrong"
if validate 1.37.0 "$wrong" >/dev/null 2>&1; then die "kubernetes-validate accepts a key that does not exist"; fi
for file in contrib/kubernetes/*.yaml; do
    # Since 1.30 a container's hook may sleep.
    for version in 1.30.0 1.37.0; do validate "$version" "$file"; done
    say "$file keeps to the schemas"
done
if have go && module=$(cd / && go mod download -json "$COMPOSE"); then
    "$python" scripts/manifests.py schema "$(python3 -c 'import json, sys; print(json.load(sys.stdin)["Dir"])' <<<"$module")/schema/compose-spec.json"
else
    echo "SKIP: the schema of compose files: no Go, or its modules cannot be downloaded"
fi
"$python" scripts/manifests.py settings "$binary"
if [ "$(id -u)" = 0 ] && have etcd; then
    unshare --mount --net --pid --fork --kill-child --mount-proc "$python" scripts/manifests.py run "$binary"
else
    echo "SKIP: the cluster of contrib/cluster: needs root, and etcd-server"
fi
