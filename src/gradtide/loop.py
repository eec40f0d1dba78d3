"""What a training loop says of its steps, from one forward to the next.

It is a part of the public side: `Replica` has it, and what concerns a run as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gradtide.core.fields import refuse
from gradtide.runtime.training import Training
from gradtide.session import Session, accumulates

KFAC = "K-FAC, whose factors are means over all ranks: use a scheme without it"
SHARDED = "sharded parameters, whose parts other ranks wait for: give this rank a batch"


class Loop:
    """The steps of a session, as the loop that makes them has a say in them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def _training(self) -> Training:
        return self._session.training

    # - What a backward does -----------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in `.grad` without exchanging them. Local.

        Use it as a context manager around all but the last backward pass of a step, on
        every rank alike. The next backward outside exchanges what has been added up.

        Returns:
            A context manager.
        """
        quiet = self._training.quiet
        self.be_quiet(True)
        try:
            yield
        finally:
            self.be_quiet(quiet)

    def be_quiet(self, quiet: bool) -> None:
        """Exchange nothing from now on, or exchange again; as `no_sync` does. Local.

        Args:
            quiet: Whether to accumulate only.
        """
        self._training.quiet = quiet
        if (kfac := self._session.kfac) is not None:
            kfac.statistics.quiet = quiet

    @property
    def forwarded(self) -> bool:
        """Whether a forward has begun whose backward is to exchange. Local."""
        return self._session.trained.forwarded

    @property
    def num_exchanges(self) -> int:
        """How many backward passes exchanged their gradients. Local."""
        return self._session.trained.num_exchanges

    # - Between backward and step ------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the averaged gradients to a total 2-norm of at most `max_norm`.

        Local. Call it between backward and step, on every rank, in the place of
        `torch.nn.utils.clip_grad_norm_`, which works as well. Nothing is exchanged:
        under a schedule that defers, every rank has told the norm of the part of the
        mean that it owns at the end of backward, from the third step on. All trainable
        parameters of the model count. What a sparse scheme keeps as the residual is
        not scaled. Where steps are exchanged (LOCAL), the norm is that of the rank's
        own gradients.

        Args:
            max_norm: The largest total 2-norm that is left as it is, above 0, in the
                units of the gradients.
            error_if_nonfinite: Whether to raise an error if the norm is infinite or
                NaN.

        Returns:
            The exact norm before scaling, the same on every rank, as a tensor without
                dimensions; float64 if any gradient is, otherwise float32.

        Raises:
            RuntimeError: The norm is not finite and `error_if_nonfinite` is True.
        """
        norm = self._training.gradient_info.clip(max_norm, error_if_nonfinite)
        if self._training.lost:  # the step is none
            return torch.zeros((), dtype=torch.float32, device="cpu")
        if (auto := self._session.auto) is not None:
            auto.inspector.note()
        return norm

    def gather_gradients(self) -> None:
        """Put the averaged gradients into `.grad` now, also under a deferred schedule.

        This is a collective call, between backward and step, for a loop that has K-FAC
        under DEAR, and reads or edits gradients; without K-FAC, reading them does the
        same. The next `step()` changes the parameters at once, and the second half of
        this step's exchange hides behind nothing. Gradients that were dropped stay so.
        Under other schedules gradients are there already, and nothing happens.
        """
        self._training.gather()

    def exchange(self) -> None:
        """Exchange the gradients that are in `.grad` now.

        This is a collective call, between backward and `optimizer.step()`, for
        gradients that no backward has exchanged: written by hand (`p.grad = ...`, from
        torch.func or several tasks), or accumulated inside `no_sync`. It does what the
        end of a backward does, by the scheme in use: what is in `.grad` afterwards is
        the mean, or stands for it under a schedule that defers. A rank that has no
        gradient of a parameter takes part with zeros. Where steps are exchanged
        (LOCAL, rounds), gradients stay the rank's own.

        Raises:
            RuntimeError: The call comes during a backward pass.
        """
        self._training.exchange_now()

    # - A rank's part in a step --------------------------------------------------------

    def weight(self, weight: float) -> None:
        """Say how much this rank counts in the mean of the step to come. Local.

        Call it in every step, on every rank, before the first backward, with what the
        step's loss is a mean over: the number of tokens, or of samples. The mean over
        ranks is then sum_r w_r g_r / sum_r w_r, that of all tokens. One weight holds
        for all micro-batches of a step: normalise their losses by the step's number.
        A rank that counts by 0 has its gradients dropped; one that has run out of
        batches inside `join` counts by 0. If all do, no rank has gradients, and
        `step()` changes nothing. Nothing more is sent, but for one small message with
        the first gradients of a run.

        Under a sparse scheme that exchanges gradients, most of what arrives is of
        earlier steps. It is not divided by this step's weights: a gradient counts by
        its weight in units of the usual mean weight. In rounds, what a rank adds counts
        by the sum of the weights of its steps.

        Args:
            weight: 0, or a number from 1e-6 to 1e12.

        Raises:
            ValueError: It is none of these; or the scheme has K-FAC.
            RuntimeError: Gradients were exchanged without weights before. The next
                backward or `step()` raises it, on every rank, if in a step only some
                ranks have called this.
        """
        kfac = self._session.kfac is not None
        refuse({f"weight() does not work with {KFAC}": kfac})
        self._session.notices.weights.give(weight)

    def skip(self) -> None:
        """Give nothing in this step, in the place of a backward.

        This is a collective call with the others' backward: this rank's part of their
        step, for a batch that is no good. A forward may come before it, or none. It
        drops what is in `.grad`. The mean is over the ranks that do not skip (under a
        sparse scheme that exchanges gradients this rank's counts as zero). Go on as
        the others: clip, `optimizer.step()`, zero the gradients. Afterwards the ranks'
        parameters are what they would be after a step, the same on all.

        If all ranks skip a step, `step()` changes nothing.

        Raises:
            ValueError: The scheme has K-FAC, or parameters are sharded.
            RuntimeError: The call comes during a backward pass, or inside `no_sync`.
        """
        kfac = self._session.kfac is not None
        wrong = {KFAC: kfac, SHARDED: bool(self._training.placement.shards)}
        refuse({f"skip() does not work with {why}": t for why, t in wrong.items()})
        if accumulates(self._session):
            raise RuntimeError(
                "skip() inside no_sync(), where nothing is exchanged: leave the batch "
                "out there, and call skip() in the place of the step's last backward"
            )
        self._session.hooks.stand_in()
        training = self._training  # perhaps a new one: ranks meet as a forward begins
        training.surviving(training.exchange_now)(True)

    def send_buffers(self) -> None:
        """Overwrite the module's buffers with rank 0's. A collective call.

        With `buffers="broadcast"` every training forward begins with it.
        """
        self._session.hooks.send_buffers()

    # - Between two steps --------------------------------------------------------------

    def flush(self) -> None:
        """Apply the updates that `step()` has deferred. Local.

        It waits for means that are on their way, but for no call of another rank.
        Under DEAR parameters that are read are brought up to date by themselves; use
        this before compiled code reads their memory outside their module's forward,
        and before a time is taken. What was exchanged in a round, and is to be applied
        later, is waited for and stays to be applied then. Under other schedules nothing
        happens.
        """
        self._session.flush()

    def end_round(self) -> None:
        """Exchange now what the round has done so far, and begin another one.

        This is a collective call, between `optimizer.step()` and the next backward, for
        a scheme with rounds of several steps (`Schedule(every=...)`); under others
        nothing happens. Afterwards all ranks have the same parameters: as at the end of
        a training, before the model is saved or used. What is under way is applied, and
        then what every rank has done since is exchanged, of all fragments. A sparse
        scheme keeps its residual.

        Raises:
            RuntimeError: The call comes during backward, inside `no_sync` or `join`; or
                some rank's parameters are infinite or NaN. It is raised on every rank.
        """
        training = self._training
        if self._session.scheme.schedule.rounds:
            self._session.refuse_moment("end_round")
            training.end_round()

    @contextmanager
    def shared_parameters(self) -> Iterator[None]:
        """Have the module compute with what all ranks agreed on last. Local.

        In a round of several steps (`Schedule(every=...)`) a rank's parameters are its
        own. Use this as a context manager around an evaluation, or around saving the
        model: inside, parameters are those of the last exchange (of each fragment, if
        there are several), the same on every rank. Afterwards the rank's own are back.
        Do not train inside. Under other schedules parameters stay what they are.

        Returns:
            A context manager.
        """
        self._training.flush()
        with self._training.actions.exchange.shared_parameters():
            yield

    # - All ranks ----------------------------------------------------------------------

    def meet(self) -> int:
        """Have ranks meet anew that have to, where they come and go.

        This is a collective call, for training with `elastic`: begin each turn of the
        loop with it, as `while sync.meet() < steps`. So ranks also end their loops
        together if one is lost in the last step. Without `elastic` it does nothing.

        Returns:
            The number of steps taken. A rank that was asked to end its round sooner
                (`Lighthouse(grace=...)`) goes on with the number of the others, so that
                it leaves numbers out. That at which a round ends it never does.

        Raises:
            CommunicationError: Too few ranks are there, for too long.
        """
        self._session.meet()
        return self._session.trained.num_steps

    def stop(self) -> None:
        """Have all ranks stop after the same step. Local.

        Any rank may call it. That is told in the message that ends the next backward,
        which travels anyway. Ask `stopping` after each step. A signal's handler may
        call this.
        """
        self._session.notices.stop = True

    @property
    def stopping(self) -> bool:
        """Whether some rank has called `stop`. Local, and alike on all ranks.

        Ask between `optimizer.step()` and the next backward: after the same step the
        answer is the same on every rank. It comes with the step in which some rank has
        called `stop` before backward ended, or, where updates are deferred, one step
        later; in a round of several steps, with its exchange.
        """
        return self._session.heard.stop
