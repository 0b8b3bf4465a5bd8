#!/bin/sh
# Install programs that the host lacks: install.sh PROGRAM[=PACKAGE]...
#
# The image `host` has no package database. The one of the host decides which packages are missing;
# they come from the host's sources, and are unpacked without their scripts. What cannot be installed
# is named, and left out.
set -e
missing= packages=
for word; do
    if ! command -v "${word%%=*}" >/dev/null; then
        missing="$missing ${word%%=*}" packages="$packages ${word#*=}"
    fi
done
[ -n "$missing" ] || exit 0

context=/run/recipe place=/tmp/install
mkdir -p $place/lists/partial $place/cache/archives/partial $place/empty

apt() {
    apt-get -q -y -o Dir::State::status=$context/dpkg-status -o Dir::State::Lists=$place/lists \
        -o Dir::Cache=$place/cache -o Dir::Etc::SourceList=$context/apt/sources.list \
        -o Dir::Etc::SourceParts=$context/apt/sources.list.d -o Dir::Etc::Parts=$place/empty \
        -o Dir::Etc::TrustedParts=/usr/share/keyrings \
        -o APT::Sandbox::User=root -o Debug::NoLocking=true "$@"
}

# A source whose key the host has elsewhere fails alone.
if [ -d $context/apt ] && [ -f $context/dpkg-status ] && [ -w /usr/bin ] \
    && { apt update || true; } && apt install --no-install-recommends --download-only $packages
then
    for package in $place/cache/archives/*.deb; do
        dpkg-deb -x "$package" /
    done
    ldconfig
else
    echo "The host lacks$missing, and so does this image. Install on the host:$packages"
fi
rm -rf $place
