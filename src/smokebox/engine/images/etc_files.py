"""Generated files of /etc: the minimum that programs need, with nothing of the host."""

from __future__ import annotations

HOSTS = """\
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
"""
HOSTNAME = "sandbox\n"
# Fails at once while nothing listens there: a sandbox without egress has no resolver.
RESOLV_CONF = "nameserver 127.0.0.1\noptions timeout:2 attempts:1\n"

PASSWD = """\
root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
bin:x:2:2:bin:/bin:/usr/sbin/nologin
sys:x:3:3:sys:/dev:/usr/sbin/nologin
games:x:5:60:games:/usr/games:/usr/sbin/nologin
mail:x:8:8:mail:/var/mail:/usr/sbin/nologin
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
_apt:x:42:65534::/nonexistent:/usr/sbin/nologin
user:x:1000:1000:user:/home/user:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
GROUP = """\
root:x:0:
daemon:x:1:
bin:x:2:
sys:x:3:
adm:x:4:
tty:x:5:
disk:x:6:
lp:x:7:
mail:x:8:
wheel:x:10:
man:x:12:
kmem:x:15:
dialout:x:20:
cdrom:x:24:
floppy:x:25:
tape:x:26:
sudo:x:27:
audio:x:29:
www-data:x:33:
shadow:x:42:
utmp:x:43:
video:x:44:
plugdev:x:46:
staff:x:50:
games:x:60:
users:x:100:
input:x:104:
kvm:x:105:
render:x:106:
user:x:1000:
nogroup:x:65534:
"""

_NSSWITCH = """\
passwd:     files
group:      files
shadow:     files
gshadow:    files
hosts:      files myhostname dns
networks:   files
protocols:  files
services:   files
ethers:     files
rpc:        files
netgroup:   files
"""
_PROFILE = """\
# Keep the PATH that the command was given.
: "${PATH:=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
export PATH
if [ -n "${BASH_VERSION-}" ] && [ -n "${PS1-}" ] && [ -r /etc/bash.bashrc ]; then
  . /etc/bash.bashrc
fi
for script in /etc/profile.d/*.sh; do
  if [ -r "$script" ]; then . "$script"; fi
done
unset script
"""
_BASHRC = """\
[ -n "${PS1-}" ] || return
shopt -s checkwinsize
PS1='\\u@\\h:\\w\\$ '
"""
_LOGIN_DEFS = """\
ENV_SUPATH\tPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV_PATH\tPATH=/usr/local/bin:/usr/bin:/bin
UMASK\t\t022
HOME_MODE\t0755
UID_MIN\t\t1000
UID_MAX\t\t60000
SYS_UID_MIN\t101
SYS_UID_MAX\t999
GID_MIN\t\t1000
GID_MAX\t\t60000
SYS_GID_MIN\t101
SYS_GID_MAX\t999
USERGROUPS_ENAB\tyes
ENCRYPT_METHOD\tSHA512
"""
# For all services, such as su, passwd and chfn (which adduser calls): root of a sandbox may
# become any user, and the rules of the host do not apply.
_PAM = """\
auth\t\tsufficient\tpam_rootok.so
auth\t\trequired\tpam_unix.so
account\t\trequired\tpam_permit.so
password\trequired\tpam_unix.so sha512
session\t\trequired\tpam_permit.so
"""
OPENSSL = """\
openssl_conf = openssl_init

[openssl_init]

[req]
default_bits = 2048
default_md = sha256
distinguished_name = req_distinguished_name
x509_extensions = v3_ca
string_mask = utf8only

[req_distinguished_name]
countryName = Country Name (2 letter code)
countryName_min = 2
countryName_max = 2
organizationName = Organization Name
commonName = Common Name
commonName_max = 64

[v3_req]
basicConstraints = CA:FALSE
keyUsage = nonRepudiation, digitalSignature, keyEncipherment

[v3_ca]
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always,issuer
basicConstraints = critical,CA:true
"""

# By name below /etc. The host's openssl.cnf is not used: it may name engines, modules and keys.
GENERATED = {
    "bash.bashrc": _BASHRC,
    "bashrc": _BASHRC,
    "environment": "",
    "group": GROUP,
    "host.conf": "multi on\n",
    "hostname": HOSTNAME,
    "hosts": HOSTS,
    "login.defs": _LOGIN_DEFS,
    "networks": "loopback 127.0.0.0\n",
    "nsswitch.conf": _NSSWITCH,
    "pam.d/other": _PAM,
    "passwd": PASSWD,
    "profile": _PROFILE,
    "resolv.conf": RESOLV_CONF,
    "shells": "/bin/sh\n/bin/bash\n/usr/bin/sh\n/usr/bin/bash\n",
    "timezone": "Etc/UTC\n",
    "ssl/openssl.cnf": OPENSSL,
}
