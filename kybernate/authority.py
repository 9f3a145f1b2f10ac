"""Which certificate authority a client trusts: that of the cluster or of the user's own NATS."""

import ssl
from pathlib import Path


def trusting(ca_file: Path | str | None) -> ssl.SSLContext:
    """A context of a client that trusts the authorities in ``ca_file`` (PEM); None: those of the machine.

    Python 3.13 refuses authorities without a key usage extension (RFC 5280, ``VERIFY_X509_STRICT``); many clusters'
    own authority has none, and Go, so kubectl and kubelet, takes them. Signatures, names and times are checked as
    ever. Raises OSError or ssl.SSLError.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
