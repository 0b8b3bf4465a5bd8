"""The certificate authority of one sandbox, which only that sandbox trusts.

Its key never enters the sandbox. It is stored on the host in a file that only its owner can read,
so that the sandbox trusts the same authority after a restart.
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

MAX_CONTEXTS = 512

_DAY = datetime.timedelta(days=1)
_AUTHORITY_LIFETIME, _SERVER_LIFETIME = 3650 * _DAY, 365 * _DAY
# Age at which the certificate of a server is replaced.
_MAX_AGE = 30 * _DAY
_MAX_COMMON_NAME = 64


class Authority:
    """Issues certificates for the servers that a sandbox connects to, on demand."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        # One key for all servers: generating one takes longer than signing.
        self._server_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: OrderedDict[str, tuple[datetime.datetime, ssl.SSLContext]] = OrderedDict()

    @classmethod
    def open(cls, path: str, name: str) -> Authority:
        """Load the authority at `path`, creating it if it is missing, broken or about to expire."""
        try:
            with open(path, "rb") as file:
                pem = file.read()
            key = serialization.load_pem_private_key(pem, None)
            certificate = x509.load_pem_x509_certificate(pem)
            fresh = certificate.not_valid_after_utc > _now() + _SERVER_LIFETIME
            if isinstance(key, ec.EllipticCurvePrivateKey) and fresh:
                return cls(key, certificate)
        except (FileNotFoundError, ValueError):
            pass
        authority = cls.make(name)
        authority._save(path)
        return authority

    @classmethod
    def make(cls, name: str) -> Authority:
        """Create an authority for the sandbox of that name."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(f"Smokebox sandbox {name}", f"Smokebox {secrets.token_hex(4)}")
        usage = _key_usage(authority=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            _builder(subject, subject, key.public_key(), _AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @property
    def pem(self) -> bytes:
        """The certificate of the authority."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def der(self) -> bytes:
        """The certificate in the form that Java needs."""
        return self._certificate.public_bytes(serialization.Encoding.DER)

    def context_for(self, host: str) -> ssl.SSLContext:
        """Return the TLS context of a server of that name. ALPN is http/1.1."""
        cached = self._contexts.get(host)
        if cached is not None and _now() - cached[0] < _MAX_AGE:
            self._contexts.move_to_end(host)
            return cached[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        _load_chain(context, self._issue(host))
        self._contexts[host] = (_now(), context)
        if len(self._contexts) > MAX_CONTEXTS:
            self._contexts.popitem(last=False)
        return context

    def _issue(self, host: str) -> bytes:
        """Return a certificate for a host, with its key."""
        key = self._server_key.public_key()
        issuer = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        certificate = (
            _builder(_name(host), self._certificate.subject, key, _SERVER_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_subject(host)]), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer.value),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM) + _key_pem(self._server_key)

    def _save(self, path: str) -> None:
        temporary = f"{path}.{secrets.token_hex(4)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            os.write(fd, self.pem + _key_pem(self._key))
        finally:
            os.close(fd)
        os.rename(temporary, path)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    lifetime: datetime.timedelta,
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        # A program in the sandbox may run with an earlier date (faketime).
        not_valid_before=_now() - _DAY,
        not_valid_after=_now() - _DAY + lifetime,
    )


def _name(common: str, organization: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common[:_MAX_COMMON_NAME])]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """Set the certificate and key of a context, which reads them from files only."""
    fd = os.memfd_create("smokebox", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
