#!/bin/sh
# Install programs that the host lacks: install.sh PROGRAM[=PACKAGE]...
#
# The image `host` has no package database. The one of the host decides which packages are missing,
# and they are unpacked without their scripts. What cannot be installed is named, and left out.
set -e
missing= packages= source=
for word; do
    if ! command -v "${word%%=*}" >/dev/null; then
        missing="$missing ${word%%=*}" packages="$packages ${word#*=}"
    fi
done
[ -n "$missing" ] || exit 0

. /etc/os-release
case $ID in
    debian) source="http://deb.debian.org/debian $VERSION_CODENAME main" ;;
    ubuntu) source="http://archive.ubuntu.com/ubuntu $VERSION_CODENAME main universe" ;;
esac
place=/tmp/install
mkdir -p $place/lists/partial $place/cache/archives/partial $place/empty
echo "deb [signed-by=/usr/share/keyrings/$ID-archive-keyring.gpg] $source" > $place/sources.list

apt() {
    apt-get -q -y -o Dir::State::status=/run/recipe/dpkg-status -o Dir::State::Lists=$place/lists \
        -o Dir::Cache=$place/cache -o Dir::Etc::SourceList=$place/sources.list \
        -o Dir::Etc::SourceParts=$place/empty -o Dir::Etc::Parts=$place/empty \
        -o APT::Sandbox::User=root -o Debug::NoLocking=true "$@"
}

if [ -n "$source" ] && [ -f /run/recipe/dpkg-status ] && [ -w /usr/bin ] \
    && apt update && apt install --no-install-recommends --download-only $packages
then
    for package in $place/cache/archives/*.deb; do
        dpkg-deb -x "$package" /
    done
    ldconfig
else
    echo "The host lacks$missing, and so does this image. Install on the host:$packages"
fi
rm -rf $place
