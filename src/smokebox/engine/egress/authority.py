"""The certificate authority of one sandbox, which nobody else trusts.

Its key never gets into the sandbox: it is in this process, and in a file of the host's that
only its owner can read, so that the sandbox trusts the same one after a restart.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import ssl
from collections import OrderedDict

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

MOST_CONTEXTS = 512

_DAY = datetime.timedelta(days=1)
_AUTHORITY_LASTS, _SERVER_LASTS, _SERVER_USED = 3650 * _DAY, 365 * _DAY, 30 * _DAY
_LONGEST_COMMON_NAME = 64


class Authority:
    """Makes certificates for the servers that a sandbox asks for, as it asks for them."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        # One for all servers: to make a key takes longer than to sign with one.
        self._server_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: OrderedDict[str, tuple[datetime.datetime, ssl.SSLContext]] = OrderedDict()

    @classmethod
    def open(cls, path: str, name: str) -> Authority:
        """The one that is kept at `path`, made if there is none."""
        try:
            with open(path, "rb") as file:
                kept = file.read()
            key = serialization.load_pem_private_key(kept, None)
            certificate = x509.load_pem_x509_certificate(kept)
            fresh = certificate.not_valid_after_utc > _now() + _SERVER_LASTS
            if isinstance(key, ec.EllipticCurvePrivateKey) and fresh:
                return cls(key, certificate)
        except (FileNotFoundError, ValueError):
            pass
        made = cls.make(name)
        made._keep(path)
        return made

    @classmethod
    def make(cls, name: str) -> Authority:
        """Another one; `name` says of which sandbox."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"Smokebox sandbox {name}", f"Smokebox {secrets.token_hex(4)}")
        usage = _usage(sign=False, authority=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            _builder(subject, subject, key.public_key(), _AUTHORITY_LASTS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @property
    def pem(self) -> bytes:
        """What the sandbox is to trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def der(self) -> bytes:
        """The same, for Java."""
        return self._certificate.public_bytes(serialization.Encoding.DER)

    def context_for(self, host: str) -> ssl.SSLContext:
        """What a server of that name shows."""
        made = self._contexts.get(host)
        if made is not None and _now() - made[0] < _SERVER_USED:
            self._contexts.move_to_end(host)
            return made[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        _load(context, self._pair(host))
        self._contexts[host] = (_now(), context)
        if len(self._contexts) > MOST_CONTEXTS:
            self._contexts.popitem(last=False)
        return context

    def _pair(self, host: str) -> bytes:
        """A certificate for a host, and its key."""
        key = self._server_key.public_key()
        issuer = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        certificate = (
            _builder(_name(host), self._certificate.subject, key, _SERVER_LASTS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign=True, authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer.value),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM) + _private(self._server_key)

    def _keep(self, path: str) -> None:
        made = f"{path}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(made, flags, 0o600)
        try:
            os.write(fd, self.pem + _private(self._key))
        finally:
            os.close(fd)
        os.rename(made, path)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    lasts: datetime.timedelta,
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        # The clock of the sandbox is ours; that of a test in it may be yesterday's.
        not_valid_before=_now() - _DAY,
        not_valid_after=_now() - _DAY + lasts,
    )


def _name(common: str, organization: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common[:_LONGEST_COMMON_NAME])]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _usage(*, sign: bool, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _load(context: ssl.SSLContext, pair: bytes) -> None:
    """Give a context its certificate; it takes files only, and this one is in memory."""
    fd = os.memfd_create("smokebox", os.MFD_CLOEXEC)
    try:
        os.write(fd, pair)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
