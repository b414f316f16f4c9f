"""Whether the broker answers: hello until it does, beats while it should.

idle      nothing is wanted; no timer counts
greeting  hello was sent and is repeated
open      the broker answered lately; beats are exchanged

idle --wake--> open if the broker was heard within the last beats, else greeting
greeting --welcome--> open
open --silence of SILENT_BEATS--> greeting
open --a beat of another broker--> greeting
"""

import math

from llmrt.client.events import Send
from llmrt.wire.envelope import encode_body, encode_header
from llmrt.wire.messages import BEAT, HELLO, Hello, Welcome

# As the broker's `dead_after_beats`: both sides give up on each other after the same silence.
SILENT_BEATS = 3.5
DEFAULT_BEAT_S = 1.0
# The first repetitions are for a broker that starts now, the later ones for a dead one.
HELLO_S, MAX_HELLO_S = 0.25, 2.0


class Link:
    """The state of one connection; an open one has a `welcome`, with the limits of the broker.

    Whoever owns it calls `wake` when something is wanted again, sets `heard_at` at each message
    and calls `tick` at `deadline` while something is wanted.
    """

    def __init__(self, hello: Hello) -> None:
        self.hello = Send([encode_header(HELLO), encode_body(hello)])
        self.welcome: Welcome | None = None
        self.heard_at = -math.inf
        self._broker_epoch = 0
        self._beat_s = DEFAULT_BEAT_S
        self._awake_since = -math.inf
        self._beat_at = math.inf
        self._hello_at = math.inf
        self._hello_s = HELLO_S

    @property
    def is_open(self) -> bool:
        return self.welcome is not None

    def wake(self, now: float) -> list[Send]:
        """Something is wanted after an idle time."""
        self._awake_since = now
        self._beat_at = now + self._beat_s
        if self.is_open and now - self.heard_at <= SILENT_BEATS * self._beat_s:
            return []
        return self.greet(now)  # the broker may have forgotten this session, or be another one

    def greet(self, now: float) -> list[Send]:
        self.welcome = None
        self._hello_s = HELLO_S
        return self._repeat_hello(now)

    def take_welcome(self, welcome: Welcome, now: float) -> bool:
        """False if it answers one of several hellos and changes nothing."""
        if self.is_open and welcome.broker_epoch == self._broker_epoch:
            return False
        self.welcome = welcome
        self._broker_epoch = welcome.broker_epoch
        # A broker's word, but the timers are ours.
        self._beat_s = welcome.beat_s if 0.01 <= welcome.beat_s <= 60 else DEFAULT_BEAT_S
        self._beat_at = now + self._beat_s
        return True

    def is_of_other_broker(self, epoch: int) -> bool:
        """Whether a beat tells of a restart; an epoch of 0 tells nothing."""
        return self.is_open and epoch not in (0, self._broker_epoch)

    def tick(self, now: float) -> list[Send]:
        if not self.is_open:
            return self._repeat_hello(now) if now >= self._hello_at else []
        if now >= self._silent_at:
            return self.greet(now)
        if now >= self._beat_at:
            self._beat_at = now + self._beat_s
            return [Send([encode_header(BEAT)])]
        return []

    def deadline(self) -> float:
        return min(self._beat_at, self._silent_at) if self.is_open else self._hello_at

    @property
    def _silent_at(self) -> float:
        """Silence counts from when something was wanted."""
        return max(self.heard_at, self._awake_since) + SILENT_BEATS * self._beat_s

    def _repeat_hello(self, now: float) -> list[Send]:
        self._hello_at = now + self._hello_s
        self._hello_s = min(2 * self._hello_s, MAX_HELLO_S)
        return [self.hello]
