"""What can go wrong while a name is turned into a local file: one line each, with the cause and the cure.

Messages name models, hosts and digests, never folders of this machine: they also go out over HTTP.
"""

from __future__ import annotations


class NameResolutionError(ValueError):
    """The name means nothing here: one line with the cause and the cure."""


class PullError(NameResolutionError):
    """A model could not be fetched. `status` is the HTTP status that says the same to a client of our own API."""

    status = 500


class NotFound(PullError):
    """No such model, tag, quantisation or file, here or at its source."""

    status = 404


class Unauthorized(PullError):
    """The source wants an account or a licence accepted."""

    status = 401


class Offline(PullError):
    """The network is needed and `--offline` forbids it."""

    status = 503


class Refused(PullError):
    """A rule of ours forbids it: plain http, a private address, a path that leaves the store, an absurd size."""

    status = 403


class BadAnswer(PullError):
    """The source answered with something else than its protocol says."""

    status = 502


class Unreachable(PullError):
    """The source could not be reached, or kept failing after all tries."""

    status = 502


class DigestMismatch(PullError):
    """The bytes received are not those that the digest names."""

    status = 502


class NoSpace(PullError):
    """The disk cannot hold it."""

    status = 507


class Unsupported(PullError):
    """The model exists and cannot run here: not GGUF, remote, a conversion of another program."""

    status = 422


class Cancelled(PullError):
    """Whoever asked went away; what was fetched is kept for next time."""

    status = 499
