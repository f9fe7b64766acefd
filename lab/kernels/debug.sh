#!/bin/sh
# Builds a kernel that checks itself, in the present folder, of the source that Debian has of it:
#
#	debug.sh VERSION RELEASE MIRROR CONFIG...
#
# CONFIG are files with what differs from `make allnoconfig`, PAHOLE the program of that name. What is left
# is `source`, `build`, to build modules with, and `root`, with what modprobe reads.
set -eu
version=$1 release=$2 mirror=$3
shift 3

mkdir -p apt/lists/partial apt/cache/archives/partial source build root
echo "deb $mirror $release main" >apt/sources.list
options="-o Dir::Etc::SourceList=$PWD/apt/sources.list -o Dir::Etc::SourceParts=/dev/null
	-o Dir::State::Lists=$PWD/apt/lists -o Dir::Cache=$PWD/apt/cache -o APT::Sandbox::User=root"
# Several words.
apt-get $options update -qq
(cd apt && apt-get $options download -qq "linux-source-$version")
dpkg --fsys-tarfile apt/linux-source-*.deb | tar -xO "./usr/src/linux-source-$version.tar.xz" |
	tar -xJ -C source --strip-components=1
rm -r apt

cat "$@" >build/asked
make -s -C source O="$PWD/build" KCONFIG_ALLCONFIG="$PWD/build/asked" allnoconfig
make -s -j"$(nproc)" -C source O="$PWD/build" vmlinux modules
make -s -C source O="$PWD/build" INSTALL_MOD_PATH="$PWD/root" modules_install

# Modules are built without these, which are most of it.
find build \( -name '*.o' -o -name '*.a' -o -name '.*.cmd' \) -delete
rm -rf source/Documentation source/drivers/gpu source/sound
