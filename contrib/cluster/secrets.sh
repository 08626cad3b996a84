#!/usr/bin/env bash
# Makes the certificates and keys of compose.yaml, in the folder ./pki: an authority, a certificate for each relay and each member of etcd,
# and a key pair for publishers' tokens. A second run replaces nothing.
#
#   ./secrets.sh [NAME...]     certificates for these hosts, in place of those of compose.yaml
set -euo pipefail

names=("$@")
[ $# -gt 0 ] || names=(etcd-1 etcd-2 etcd-3 origin-1 origin-2 edge-1 edge-2 edge-3)
umask 077
mkdir -p pki
cd pki

# Private keys are elliptic curves: smaller and faster than RSA, and both etcd and Millrace read them.
new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }

if [ ! -e ca.pem ]; then
    new_key ca.key
    openssl req -x509 -new -key ca.key -subj "/CN=millrace cluster" -days 3650 -out ca.pem
fi

# etcd's JSON gateway is a client of its own server, with the server's certificate. Relays connect to each other. So each certificate is
# one for servers and for clients.
for name in "${names[@]}"; do
    [ ! -e "$name.pem" ] || continue
    new_key "$name.key"
    openssl req -new -key "$name.key" -subj "/CN=$name" -out "$name.csr"
    openssl x509 -req -in "$name.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -out "$name.pem" 2>/dev/null -extfile - <<EXTENSIONS
subjectAltName = DNS:$name, DNS:localhost, IP:127.0.0.1
extendedKeyUsage = serverAuth, clientAuth
EXTENSIONS
    rm "$name.csr"
done

if [ ! -e publisher.key ]; then
    openssl genpkey -algorithm ed25519 -out publisher.key
fi
openssl pkey -in publisher.key -pubout -out publisher.pub
