"""What leaves a sequence, and why it ends, in llama-server's order (its `process_token`)."""

from __future__ import annotations

from ftgguf.engine.detokenizer import Piece
from ftgguf.engine.messages import Delta, Generate, TokenProbs
from ftgguf.engine.request import Sequence, TextDecoder


class Output:
    """The generated side of one sequence: its text decoder, and what ended it.

    A request that does not stream gets the same pieces, joined into one delta.
    """

    __slots__ = ("_decoder", "_pieces", "_stream", "_timed", "stop_type", "stopping_word")

    def __init__(self, request: Generate, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._stream = request.stream
        self._timed = request.t_max_predict_ms > 0
        self._pieces: list[Piece] = []
        self.stop_type = "none"
        self.stopping_word = ""

    @property
    def ended(self) -> bool:
        return self.stop_type != "none"

    @property
    def has_new_line(self) -> bool:
        return self._decoder.has_new_line

    def push(self, sequence: Sequence, token: int, probs: TokenProbs | None, eog: bool, full: bool) -> Delta | None:
        """Account for a generated token; `full`: the context has no room for another one.

        Sets `stop_type` when the sequence ends here. Returns the text that may leave.
        """
        elapsed = sequence.clock.predicted_ms() if self._timed else 0.0
        piece = self._decoder.push(token, probs, elapsed)
        if piece.stop is not None:
            self.stop_type, self.stopping_word = "word", piece.stop
        elif piece.limit:
            self.stop_type = "limit"
        cut = self.ended
        if full:
            sequence.truncated = True
            self.stop_type = "limit"
        if not self.ended and 0 <= sequence.limit <= sequence.n_generated:
            self.stop_type = "limit"
        if eog:
            self.stop_type = "eos"
        pieces = [piece]
        if self.ended and not cut:
            pieces.append(self._decoder.finish())
        return self._delta(sequence, pieces)

    def exhaust(self, sequence: Sequence) -> Delta | None:
        """End the sequence because no cell is left for its next token; returns what was held back."""
        self.stop_type, sequence.truncated = "limit", True
        return self._delta(sequence, [self._decoder.finish()])

    def _delta(self, sequence: Sequence, pieces: list[Piece]) -> Delta | None:
        if not self._stream:
            self._pieces += pieces
            if not self.ended:
                return None
            pieces = self._pieces
        if len(pieces) == 1:
            piece = pieces[0]
            text, tokens, probs = piece.text, piece.tokens, piece.probs
        else:
            text = "".join([piece.text for piece in pieces])
            tokens = tuple([token for piece in pieces for token in piece.tokens])
            probs = tuple([entry for piece in pieces for entry in piece.probs])
        if not text and not tokens:
            return None
        return Delta(
            id=sequence.id,
            text=text,
            tokens=tokens,
            probs=probs,
            predicted_n=sequence.n_generated,
            timings=sequence.timings(),
            stopped=self.stop_type == "word",
        )
