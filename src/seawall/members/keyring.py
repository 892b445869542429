"""Shared keys of a cluster: they sign every message, and optionally encrypt it.

Promises:
- A message is accepted only from senders that have a key of the ring, and only within the same
  group.
- Keys can be replaced without any two members failing to understand each other in between.
- No key is ever shown, neither by `repr` nor in an error.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from seawall import _checks as check

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SHORTEST_KEY: Final = 16
"""Minimum length of a key in bytes."""
MOST_KEYS: Final = 8
"""Maximum number of keys in a ring. An unsigned message is checked against each of them."""
TAG: Final = 16
"""Number of bytes that a signature or the encryption adds to a message."""
MISSING: Final = "Keyring(encrypt=True) needs cryptography: pip install 'seawall[cryptography]'"


class Keyring:
    """The keys of a cluster: the first one signs, and any of them verifies a message.

    A key is a secret of at least 16 bytes from a random source, such as `secrets.token_hex()`, and
    comes from where the program keeps its secrets: `Keyring(os.environ["CLUSTER_KEY"])`.

    To replace a key without downtime, complete each step on every member before the next one, by a
    rolling restart with other arguments, or with these methods while the program runs:

        1. `add(new)`: `Keyring(old, new)`. All members understand the new key.
        2. `use(new)`: `Keyring(new, old)`. All members sign with it.
        3. `remove(old)`: `Keyring(new)`. The old key is no longer accepted.

    `encrypt=True` encrypts outgoing messages with AES-GCM and needs the extra
    `seawall[cryptography]`. Signed and encrypted messages are understood either way, so members can
    be switched one after another, once all of them have the extra.
    """

    __slots__ = ("_by_group", "_keys", "encrypts")

    def __init__(self, *keys: bytes | str, encrypt: bool = False) -> None:
        """Sign with the first of `keys`, and accept all of them."""
        if not keys:
            raise ValueError("Keyring(): pass at least one key, such as Keyring(secret)")
        self.encrypts = check.flag("encrypt", encrypt)
        if encrypt and _aes_gcm() is None:
            raise ImportError(MISSING)
        self._replace(())
        for key in keys:
            self.add(key)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        how = ", encrypts" if self.encrypts else ""
        return f"<Keyring of {len(self._keys)}{how}>"

    def add(self, key: bytes | str) -> None:
        """Also accept messages signed with `key`: step 1. A known key changes nothing."""
        key = _checked(key)
        if key in self._keys:
            return
        if len(self._keys) >= MOST_KEYS:
            raise ValueError(
                f"a Keyring holds at most {MOST_KEYS} keys: remove() those that no one signs with"
            )
        self._replace((*self._keys, key))

    def use(self, key: bytes | str) -> None:
        """Sign with `key` from now on: step 2."""
        key = self._known(key, "add() it on every member first")
        self._replace((key, *(other for other in self._keys if other != key)))

    def remove(self, key: bytes | str) -> None:
        """Refuse messages signed with `key`: step 3."""
        key = self._known(key, "it was removed before, or is another one than you meant")
        if key == self._keys[0]:
            raise ValueError(
                "this key signs the messages of this member: use() another one before remove()"
            )
        self._replace(tuple(other for other in self._keys if other != key))

    def for_group(self, group: str) -> tuple[GroupKey, ...]:
        """Return the keys derived for `group`, the signing key first."""
        by_group = self._by_group
        keys = by_group.get(group)
        if keys is None:
            keys = by_group[group] = tuple(GroupKey(key, group) for key in self._keys)
        return keys

    def _replace(self, keys: tuple[bytes, ...]) -> None:
        """Replace the keys; safe while another thread uses them."""
        self._keys = keys
        self._by_group: dict[str, tuple[GroupKey, ...]] = {}

    def _known(self, key: bytes | str, otherwise: str) -> bytes:
        key = _checked(key)
        if key not in self._keys:
            raise ValueError(f"this key is not in the Keyring: {otherwise}")
        return key


class GroupKey:
    """Signing and encryption keys, derived from a secret and the name of a group.

    An empty secret keeps groups apart, but proves nothing.
    """

    __slots__ = ("_cipher", "_signing_key")

    def __init__(self, secret: bytes, group: str) -> None:
        root = blake2b(secret, person=b"seawall keyring").digest()
        name = group.encode()
        self._signing_key = blake2b(name, key=root, digest_size=32, person=b"sign").digest()
        kind = _aes_gcm()
        key = blake2b(name, key=root, digest_size=32, person=b"encrypt").digest()
        self._cipher = kind(key) if kind else None

    def sign(self, data: bytes | memoryview) -> bytes:
        """Return the signature of `data`."""
        return blake2b(data, key=self._signing_key, digest_size=TAG).digest()

    def verifies(self, data: bytes | memoryview, signature: bytes) -> bool:
        """Return whether `signature` was made from `data` with this key."""
        return compare_digest(self.sign(data), signature)

    @property
    def cipher(self) -> AESGCM:
        """The AES-GCM cipher; raises ImportError without the extra."""
        if self._cipher is None:
            raise ImportError(MISSING)
        return self._cipher


def check_exposure(host: str, keyring: Keyring | None) -> None:
    """Raise ValueError if a member without a key would listen where other machines can reach it."""
    if keyring is None and not _is_loopback(host):
        raise ValueError(
            f"a cluster on {host!r} is reached by other machines, and without a key it would"
            " believe whatever they say: pass keyring=Keyring(secret), the same on every member,"
            " or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False  # a name can resolve to any address, and to another one later
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _checked(key: bytes | str) -> bytes:
    if not isinstance(key, (bytes, str)):
        raise TypeError(f"a key of type {type(key).__name__}: pass bytes or text")
    key = key.encode() if isinstance(key, str) else key
    if len(key) < SHORTEST_KEY:
        raise ValueError(
            f"a key of {len(key)} bytes can be guessed: pass at least {SHORTEST_KEY} random ones,"
            " such as secrets.token_hex()"
        )
    return key


@lru_cache(maxsize=1)
def _aes_gcm() -> type[AESGCM] | None:
    """Return the AES-GCM class; None if the extra is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        return None
    return AESGCM
