"""Teams of streams, each with turns of its own, so that as many passes run at once as there are teams."""

import threading

from .turns import Takeable, Turns


class Teams(Takeable):
    """A stream takes turns with those of its team only. It changes teams where that makes the streams that want turns lately more equal
    in number, since teams share the processor's cores equally.

    With one team all streams take turns.
    """

    def __init__(self, count: int = 1) -> None:
        self._turns = [Turns() for _ in range(count)]
        self._lock, self._members = threading.Lock(), dict[int, Turns]()

    def turns(self, stream: int) -> Turns:
        """Where a stream takes its next turn; or where its thread has taken one (``of``), if it has."""
        with self._lock:
            own = self._members.get(stream, self._turns[0])
            if len(self._turns) > 1 and not own.mine:
                own = min(self._turns, key=lambda turns: (turns.active(stream), turns is not own))
                for turns in self._turns:
                    if turns is not own:
                        turns.forget(stream)
                own.join(stream)
                self._members[stream] = own
            return own

    @property
    def mine(self) -> bool:
        """Whether this thread has a turn."""
        return any(turns.mine for turns in self._turns)

    def take(self, stream: int) -> None:
        """Waits for a turn that no other stream has one beside, of any team."""
        for turns in self._turns:
            turns.take(stream)
        if len(self._turns) > 1:  # it may not decode at all, which would leave a stream alone with half of the threads
            self.forget(stream)

    def give(self) -> None:
        """Ends this thread's turns, if it has any."""
        for turns in self._turns:
            turns.give()

    def yield_turn(self, stream: int) -> None:
        """Lets those that wait go first, if this thread has the turn that ``take`` waits for."""
        if self.mine and any(turns.wanted for turns in self._turns):
            self.give()
            self.take(stream)

    def shared(self, stream: int) -> bool:
        """Whether another stream than this one has wanted a turn lately."""
        return any(turns.active(stream) for turns in self._turns)

    def forget(self, stream: int) -> None:
        """The stream has come to the end of a text, or is closed."""
        for turns in self._turns:
            turns.forget(stream)
