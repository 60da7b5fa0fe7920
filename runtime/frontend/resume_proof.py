"""Shows that a server of this deployment has let a request in: limits hold it up no second time.

Otherwise whoever says that his request is to be resumed would get past everybody that waits.
"""

import hashlib
import hmac
from collections import OrderedDict

from runtime.arrays import INT32, pack
from runtime.request import Request

PURPOSE = b"lockstep resume proof 1"
# A stream breaks now and then. Who has one request let in mustn't run it again and again.
MAX_USES = 4
# Proofs whose uses are remembered: who wants one forgotten has as many others let in first.
MAX_REMEMBERED = 65_536


class ResumeProofs:
    """Gives proofs and checks them. All frontends with one engine token believe each other's."""

    def __init__(self, engine_token: str) -> None:
        self._key = hmac.digest(engine_token.encode(), PURPOSE, "sha256")
        self._num_uses: OrderedDict[bytes, int] = OrderedDict()  # the latest last

    def of(self, request: Request, fingerprint: str) -> bytes:
        """Of what decides how much work a request is, and whose; not of its id and its past."""
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        numbers = (request.seed, request.params.n, request.params.max_tokens, request.priority)
        for part in (
            fingerprint.encode(),
            request.tenant.encode(),
            repr(numbers).encode(),
            pack(INT32, request.prompt_token_ids),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def use(self, proof: bytes, request: Request, fingerprint: str) -> bool:
        """Whether it shows that the request was let in before; not where it has done so often."""
        if not hmac.compare_digest(proof, self.of(request, fingerprint)):
            return False
        num_uses = self._num_uses.pop(proof, 0) + 1
        self._num_uses[proof] = num_uses
        if len(self._num_uses) > MAX_REMEMBERED:
            self._num_uses.popitem(last=False)
        return num_uses <= MAX_USES
