#!/bin/sh
# Installs what it takes to build xtask: a C compiler and Rust. Where these are there, everything
# else is installed by `cargo xtask setup`. Debian 12 or 13, as root. Does nothing when all is there.
set -eu

rust_minor_wanted=90

install() {
	if [ "$(id -u)" -ne 0 ]; then
		echo "bootstrap: run as root, or install these packages: $*" >&2
		exit 1
	fi
	echo "bootstrap: installing $*"
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

rust_is_recent() {
	command -v cargo >/dev/null && command -v rustc >/dev/null || return 1
	minor=$(rustc --version | sed -n 's/^rustc 1\.\([0-9]*\)\..*/\1/p')
	[ "${minor:-0}" -ge "$rust_minor_wanted" ]
}

wanted=
if ! command -v cc >/dev/null; then
	wanted="gcc libc6-dev"
fi
# Debian's own `rustc` is too old; `rustc-web` is the one that its browsers are built with.
if ! rust_is_recent; then
	wanted="$wanted ca-certificates cargo-web rustc-web rustfmt-web rust-web-clippy"
fi
if [ -n "$wanted" ]; then
	# What building needs next, in the same call, which saves time. A line with another release is left out.
	VERSION_ID=
	. /etc/os-release
	cd "$(dirname "$0")/.."
	# shellcheck disable=SC2046,SC2086 # names of packages are words
	install $wanted $(sed "s/#.*//; s/ \\[$VERSION_ID\\]//; /\\[/d" xtask/build-packages.txt lab/host-packages.txt)
	rust_is_recent || {
		echo "bootstrap: rustc 1.$rust_minor_wanted or newer is needed, found: $(rustc --version)" >&2
		echo "bootstrap: it is in the security updates of Debian 12 and 13: are they among apt's sources?" >&2
		exit 1
	}
fi
