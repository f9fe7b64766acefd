#!/bin/sh
# Unpacks a kernel of Debian, with what modules are built with, in the folder `root` of the present one:
#
#	added.sh FLAVOUR RELEASE MIRROR
#
# FLAVOUR is that of Debian's packages, such as rt-amd64, RELEASE that of Debian.
set -eu
flavour=$1 release=$2 mirror=$3

mkdir -p apt/lists/partial apt/cache/archives/partial root/usr/lib
echo "deb $mirror $release main" >apt/sources.list
options="-o Dir::Etc::SourceList=$PWD/apt/sources.list -o Dir::Etc::SourceParts=/dev/null
	-o Dir::State::Lists=$PWD/apt/lists -o Dir::Cache=$PWD/apt/cache -o APT::Sandbox::User=root"
# Several words.
apt-get $options update -qq
image=$(apt-cache $options depends "linux-image-$flavour" | sed -n 's/.*Depends: //p')
kernel=${image#linux-image-}
version=${kernel%-"$flavour"}
(cd apt && apt-get $options download -qq "$image" "linux-headers-$kernel" \
	"linux-headers-$version-common-${flavour%-*}" "linux-kbuild-$version")
# As the image has it, which this is mounted over.
for package in apt/*.deb; do
	dpkg --fsys-tarfile "$package" | tar -x -C root --keep-directory-symlink
done
ln -s usr/lib root/lib
depmod -b root "$kernel"
rm -r root/lib apt
