#!/bin/sh
# Make certificates to try TLS: `tools/make_certificates.sh FOLDER [NAME ...]`.
#
# Writes an authority (ca.crt, ca.key) and two certificates signed by it: router.crt for localhost,
# 127.0.0.1, the router's names in Compose and Kubernetes, and each NAME; node.crt for node.baton,
# the name of all nodes. They are valid for 90 days. Do not copy ca.key to the servers.
set -eu
umask 077

folder=${1:?usage: make_certificates.sh FOLDER [NAME ...]}
shift
mkdir -p "$folder"
cd "$folder"

authority() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 90 \
        -subj "/CN=baton" -keyout ca.key -out ca.crt \
        -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
}

sign() { # COMMON_NAME ALT_NAMES
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes \
        -subj "/CN=$1" -keyout "$1.key" -out "$1.csr"
    printf '%s\n' "subjectAltName=$2" "extendedKeyUsage=serverAuth,clientAuth" \
        "basicConstraints=critical,CA:FALSE" > "$1.ext"
    openssl x509 -req -days 90 -in "$1.csr" -CA ca.crt -CAkey ca.key -extfile "$1.ext" -out "$1.crt"
    rm "$1.csr" "$1.ext"
}

others=
for name; do
    others="$others,DNS:$name"
done
{
    authority
    sign router "DNS:localhost,IP:127.0.0.1,DNS:router,DNS:router.baton,DNS:router.baton.svc,DNS:router.baton.svc.cluster.local$others"
    sign node DNS:node.baton
} 2> openssl.log || { cat openssl.log >&2; exit 1; }
rm openssl.log
echo "in $folder: ca.crt for all processes and clients, router.crt and router.key, node.crt and node.key"
