"""The certificate of HTTPS, checked before anything slow starts."""

from __future__ import annotations

import os
import ssl

from tokenspeed_core.commands.serving import ConfigError


def check_certificate(certfile: str, keyfile: str | None) -> None:
    """Load a certificate and its key. Raises ConfigError that says which file is wrong."""
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is not None:
            try:
                open(path, "rb").close()
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise ConfigError(f"{flag} {path}: {reason}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = f"--ssl-keyfile {keyfile}" if keyfile else f"--ssl-certfile {certfile}"

    def refuse_password() -> str:
        raise ConfigError(
            f"{where}: the key is encrypted. Decrypt it: the server cannot ask for a password."
        )

    try:
        context.load_cert_chain(certfile, keyfile, refuse_password)
    except ssl.SSLError as error:
        what = (
            "does not belong to the certificate"
            if "MISMATCH" in str(error.reason)
            else "the certificate and its key must be in PEM format"
        )
        raise ConfigError(f"{where}: {what} ({error.reason or 'no PEM data'})") from error
