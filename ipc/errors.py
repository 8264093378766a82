"""The errors of the contract. A message says which row, step or request, what was expected and what came."""


class AsyncbookError(Exception):
    """Base of every error that asyncbook raises on purpose."""


class ContractError(AsyncbookError):
    """The caller's mistake. The book is as it was before the call."""


class BookFull(ContractError):
    """No free row, or no memory for one."""


class DuplicateRequest(ContractError, ValueError):
    """A request of this id is still live."""


class StaleRow(ContractError):
    """The handle names a row that was released, resumed, rewound or given to another request since."""


class InvalidBatch(ContractError, ValueError):
    """Wrong shape, dtype or number in a batch or in what was sampled for it."""


class InvalidToken(ContractError, ValueError):
    """A token id outside the vocabulary in a prompt."""


class InvalidRequest(ContractError, ValueError):
    """Request parameters or a row operation that cannot be right."""


class PromptTooLong(ContractError, ValueError):
    """Prompt and earlier outputs do not fit `max_model_len`."""


class InFlightFull(ContractError):
    """`max_in_flight` steps (or all the room for other messages) are not yet applied. Wait for `room()`."""


class FrameExpired(ContractError):
    """The frame's memory has been given to a later step."""


class NotApplied(ContractError):
    """The step, or the admission of the row, is not applied yet."""


class PeerError(AsyncbookError):
    """The other side's fault."""


class SidecarDied(PeerError):
    """The sidecar process ended without being asked to."""


class SidecarTimeout(PeerError, TimeoutError):
    """The sidecar did not get there in the time allowed."""


class HandshakeFailed(PeerError):
    """The sidecar could not be started, or did not prove that it is ours."""


class LayoutMismatch(HandshakeFailed):
    """Runner and sidecar disagree on the bytes of the segment or of the messages."""


class RunnerDied(PeerError):
    """The process whose book this is ended without closing it."""


class OutputsLost(PeerError):
    """A reader was so far behind that what it had not read yet had to go."""


class BookClosed(AsyncbookError):
    """A call on a book that was closed."""


class BadMessage(AsyncbookError):
    """A message that does not decode or does not make sense; it is counted and skipped, never applied in part."""
