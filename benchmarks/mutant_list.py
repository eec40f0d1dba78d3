"""Mistakes that the tests have to notice: data of `mutants`, and of a test."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A mistake: a text that stands in a file once, and what stands there instead."""

    name: str
    file: str  # in src/gradtide
    text: str
    instead: str
    wrong: str  # what is wrong then
    tests: tuple[str, ...]  # in tests: files that should notice

    def apply(self, code: str) -> str:
        """The code with the mistake; ValueError if its text is not there once."""
        if (count := code.count(self.text)) != 1:
            raise ValueError(
                f"{self.name}: change it with the code; its text occurs {count} times"
            )
        return code.replace(self.text, self.instead)


MUTANTS = (
    # - core ---------------------------------------------------------------------------
    Mutant(
        "core-launch-by-completion",
        "core/step.py",
        """\
            bucket = plan[self._cursor]
            if not ready(bucket):
                return
""",
        """\
            idle = [b for b in plan if b.stage in (Stage.IDLE, Stage.DUE)]
            bucket = next(filter(ready, idle), None)
            if bucket is None:
                return
""",
        "buckets leave in the order in which they get full, not in that of the plan",
        ("core/test_step.py",),
    ),
    Mutant(
        "core-release-order",
        "core/step.py",
        """\
        for bucket in reversed(self._driver.buckets):
            bucket.move("step")
""",
        """\
        for bucket in self._driver.buckets:
            bucket.move("step")
""",
        "second halves leave from the first bucket on, though the last is read first",
        ("core/test_step.py",),
    ),
    Mutant(
        "core-round-late",
        "core/schedule.py",
        "return (position - left) % self.every >= self.delay",
        "return (position - left) % self.every > self.delay",
        "a fragment under way is applied a step late",
        ("core/test_step.py",),
    ),
    Mutant(
        "core-settled-ignored",
        "core/engine.py",
        """\
        if settled:

            def both""",
        """\
        if not flow:

            def both""",
        "what needs all before it at their cut does not wait for that",
        ("core/test_engine.py",),
    ),
    Mutant(
        "core-stale-mean",
        "core/payload.py",
        "elif last is not None and mean._version == self._version:",
        "elif last is not None:",
        "a sparse mean that somebody else wrote to is not cleared",
        ("core/test_payload.py",),
    ),
    Mutant(
        "core-nesterov",
        "core/outer.py",
        "own = self.lr * (self.momentum if self.nesterov else 1.0)",
        "own = self.lr",
        "Nesterov's outer step counts its velocity without the momentum",
        ("runtime/exchange/test_rounds.py",),
    ),
    Mutant(
        "core-levels-factor",
        "core/levels.py",
        "part.div_(self.group.size)",
        "part.div_(self.local)",
        "a mean host by host is over the ranks of one host, not over all",
        ("core/test_host_by_host.py",),
    ),
    Mutant(
        "fields-numbers",
        "core/fields.py",
        "type(x) in (int, float) and math.isfinite(x)",
        "type(x) in (int, float)",
        "an infinite hyper-parameter is taken",
        ("test_scheme.py",),
    ),
    Mutant(
        "muon-learning-rate",
        "core/torch_internals/muon.py",
        "from torch.optim._muon import _adjust_lr as adjust_lr\n",
        """\


def adjust_lr(lr, *_):  # type: ignore
    return lr
""",
        "Muon's learning rate is not adjusted to a matrix's shape",
        ("optim/test_muon.py",),
    ),
    Mutant(
        "core-leaves-out-what-leaves",
        "core/step.py",
        "        last = min(target, self.schedule.next_leaving(self.position))\n",
        "        last = target\n",
        "a slow rank leaves out a step after which others exchange something",
        ("core/test_step.py",),
    ),
    # - collectives --------------------------------------------------------------------
    Mutant(
        "dense-round-off-counts-once",
        "collectives/dense.py",
        "own.add_(round_off(part, codec), alpha=group.size)",
        "own.add_(round_off(part, codec))",
        "what a wire takes off a mean is owed once, where it is missing on P ranks",
        ("test_law.py",),
    ),
    Mutant(
        "topka2a-no-mean",
        "collectives/topka2a.py",
        "    part.div_(size)\n",
        "",
        "a sum for a mean: 1/P is left out",
        ("collectives/test_topka2a.py",),
    ),
    Mutant(
        "oktopk-residual-dropped",
        "collectives/oktopk.py",
        "left = rest.index_select(0, delivered)",
        "left = rest.new_zeros(len(delivered))",
        "what the wire takes off winners is forgotten",
        (
            "collectives/test_oktopk.py",
            "test_law.py",
        ),
    ),
    Mutant(
        "oktopk-rounded-to-zero",
        "collectives/oktopk.py",
        "lost.mul_(group.size * (part != 0))",
        "lost.mul_(group.size)",
        "a winner whose mean is rounded to zero is owed twice",
        (
            "collectives/test_oktopk.py",
            "test_law.py",
        ),
    ),
    Mutant(
        "oktopk-never-rebalanced",
        "collectives/oktopk.py",
        "            or step % self.rebalance == 0\n",
        "",
        "regions stay where the first step cut them",
        ("collectives/test_oktopk.py",),
    ),
    Mutant(
        "lowrank-sign",
        "collectives/lowrank.py",
        "w.addmm_(b, c.T, alpha=-1)",
        "w.addmm_(b, c.T, alpha=1)",
        "what was sent is added to the residual, and not taken from it",
        ("collectives/test_lowrank.py",),
    ),
    Mutant(
        "momentum-not-masked",
        "collectives/momentum_correction.py",
        "            velocity.index_fill_(0, gone.long(), 0)\n",
        "",
        "the velocity of what was sent goes on",
        ("collectives/test_momentum_correction.py",),
    ),
    Mutant(
        "levels-residual-units",
        "collectives/levels.py",
        "if residual and not empty:",
        "if residual and empty:",
        "the residual of a host's mean is not multiplied by its ranks",
        ("collectives/test_levels.py",),
    ),
    Mutant(
        "warmup-one-short",
        "collectives/warmup.py",
        "stage = step // self.steps",
        "stage = (step + 1) // self.steps",
        "every stage of a warm-up begins a step early",
        ("collectives/test_warmup.py",),
    ),
    Mutant(
        "indices-of-segments",
        "collectives/_indices.py",
        "shifts = [plan.edges[s] - b for s, b in zip(segments, begins, strict=False)]",
        "shifts = [plan.edges[s] for s, _ in zip(segments, begins, strict=False)]",
        "indices of a rank's second segment are shifted too far",
        ("collectives/test_partitioned.py",),
    ),
    Mutant(
        "winners-infinite",
        "collectives/_winners.py",
        "return levels.nan_to_num(LARGEST, LARGEST)",
        "return levels.nan_to_num(0.0, 0.0)",
        "infinities and NaNs rank below large numbers",
        ("collectives/test_oktopk.py",),
    ),
    Mutant(
        "nonzero-last-code",
        "collectives/_nonzero.py",
        ".masked_fill_(missing, 0)",
        ".masked_fill_(missing, 1)",
        "what stands for no code is added to the last one",
        ("collectives/test_nonzero.py",),
    ),
    Mutant(
        "indices-ones-of-a-byte",
        "wire/fast_indices.py",
        "upper[place >> 3] |= np.uint8(1 << (place & 7))",
        "upper[place >> 3] = np.uint8(1 << (place & 7))",
        "of the ones of a byte only the last is written",
        ("wire/test_indices.py",),
    ),
    # - selectors ----------------------------------------------------------------------
    Mutant(
        "selector-infinities-cut-off",
        "selectors/follow.py",
        "        least = info.max\n",
        "        return found\n",
        "infinities behind the limit stay in the residual",
        ("selectors/test_selectors.py",),
    ),
    Mutant(
        "selector-corrects-backwards",
        "selectors/follow.py",
        "ideal = used * (len(found) / k) ** (1 / slope) if whole else used",
        "ideal = used * (k / len(found)) ** (1 / slope) if whole else used",
        "a threshold that finds too much is lowered",
        ("selectors/test_selectors.py",),
    ),
    Mutant(
        "scan-last-element",
        "selectors/fast.py",
        "for i in range(whole, bits.size):",
        "for i in range(whole, bits.size - 1):",
        "the compiled scan does not look at the last element",
        ("selectors/test_kernels.py",),
    ),
    Mutant(
        "index-dtype",
        "selectors/indices.py",
        (
            "return torch.arange(x.numel(), dtype=index_dtype(x.numel()), "
            "device=x.device)"
        ),
        (
            "return torch.arange(1, x.numel() + 1, "
            "dtype=index_dtype(x.numel()), device=x.device)"
        ),
        "all entries are those from the second one on",
        (
            "selectors/test_kernels.py",
            "selectors/test_selectors.py",
        ),
    ),
    # - wire ---------------------------------------------------------------------------
    Mutant(
        "int8-scale-down",
        "wire/formats.py",
        "return ((exact + 0xFFF) & ~0xFFF).view(torch.float32)[:, None]",
        "return (exact & ~0xFFF).view(torch.float32)[:, None]",
        "a scale is rounded down, so that the largest values do not fit",
        ("wire/test_blocks.py",),
    ),
    Mutant(
        "two-means-tie",
        "wire/fast.py",
        "num_above += np.int32(size >= least)",
        "num_above += np.int32(size > least)",
        "compiled, a magnitude at the middle is summed and not counted",
        ("wire/test_blocks.py",),
    ),
    Mutant(
        "wire-infinite-residual",
        "wire/blocks.py",
        "rest = torch.where(finite[:, None], rest, stays)",
        "rest = torch.where(finite[:, None], rest, x)",
        "what is not finite stays in the residual",
        ("wire/test_blocks.py",),
    ),
    # - transport ----------------------------------------------------------------------
    Mutant(
        "ring-divides-at-every-hop",
        "transport/ring.py",
        "if hop == adding and divisor != 1:",
        "if divisor != 1:",
        "partial sums are divided, too",
        (
            "transport/test_links.py",
            "test_transport.py",
        ),
    ),
    Mutant(
        "rotation-adds-in-another-order",
        "transport/rotation.py",
        "first, *others = (arriving[(rank + i) % size] for i in range(1, size))",
        "first, *others = (arriving[(rank - i) % size] for i in range(1, size))",
        "a small part is summed in another order than the ring's",
        (
            "transport/test_links.py",
            "test_transport.py",
        ),
    ),
    Mutant(
        "queue-begins-beyond-settled",
        "transport/comm_queue.py",
        "if item is None or not item.ready or item.job.settled:",
        "if item is None or not item.ready:",
        "an item begins that waits for all before it to be at their cut",
        (
            "test_transport.py",
            "core/test_engine.py",
        ),
    ),
    Mutant(
        "hosts-launcher-overrules",
        "transport/hosts.py",
        "if len(set(keys)) == len(told) and all(one.launched for one in told):",
        "if all(one.launched for one in told):",
        "a launcher's word counts also where ranks see that they share a host",
        ("test_two_levels.py",),
    ),
    Mutant(
        "inquiry-other-queue",
        "transport/inquiry.py",
        "            and other.submitted < number\n",
        "            and other.submitted > number\n",
        "ranks that wait for each other in two queues are not noticed",
        ("test_inquiry.py",),
    ),
    Mutant(
        "shards-total",
        "transport/shards.py",
        "numbers = torch.stack(found).sum(0).to(numbers.device)",
        "numbers = found[0].to(numbers.device)",
        "a norm of shards is that of the first one",
        ("test_sharded.py",),
    ),
    Mutant(
        "transport-asked-for-any-exchange",
        "transport/grace.py",
        "        if now is None or now.heard[0] != now.exchange:\n",
        "        if now is None or now.heard[0] < 0:\n",
        "a word that comes late shortens a slow rank's next round",
        ("transport/test_grace.py",),
    ),
    Mutant(
        "transport-asks-while-means-travel",
        "transport/grace.py",
        "            if not wait.idle():\n",
        "            if False:\n",
        "a link that is slow has ranks leave steps out",
        ("transport/test_grace.py",),
    ),
    # - runtime ------------------------------------------------------------------------
    Mutant(
        "runtime-shortened-in-a-later-backward",
        "runtime/training.py",
        "            if self._grace is not None and not self._untaken:\n",
        "            if self._grace is not None:\n",
        "in a step of several backwards a slow rank sends flags less often than others",
        ("test_regrouping.py",),
    ),
    Mutant(
        "runtime-steps-left-out-weigh-nothing",
        "runtime/weights.py",
        "        self._sum += steps * (self.own or self._usual)\n",
        "        return\n",
        "what a slow rank did in a round is made smaller",
        ("runtime/test_weights.py",),
    ),
    Mutant(
        "steps-gain",
        "runtime/exchange/steps.py",
        "weight = consensus.weight(p) * more",
        "weight = more",
        "a step that is exchanged counts without its gain",
        ("runtime/exchange/test_steps.py",),
    ),
    Mutant(
        "steps-debt",
        "runtime/exchange/steps.py",
        "view.add_(self.consensus.moved[p], alpha=-owed)",
        "view.add_(self.consensus.moved[p], alpha=owed)",
        "what was sent ahead is sent again, and not owed",
        ("runtime/exchange/test_steps.py",),
    ),
    Mutant(
        "rounds-mix",
        "runtime/exchange/rounds.py",
        "foreach_add_(params, shared, alpha=1 - mix)",
        "foreach_add_(params, shared, alpha=mix)",
        "a late exchange is mixed in by the share that is kept",
        ("runtime/exchange/test_rounds.py",),
    ),
    Mutant(
        "rounds-no-abstention",
        "runtime/exchange/rounds.py",
        "return words_of(None if late else checksum(held), group)",
        "return words_of(checksum(held), group)",
        "a rank that has yet to apply an exchange is told to have come apart",
        ("runtime/exchange/test_rounds.py",),
    ),
    Mutant(
        "due-aliases-not-seen",
        "runtime/deferred/due.py",
        "if counts == self._expected:",
        "if len(counts) == len(self._expected):",
        "who shares a parameter's memory is never noticed",
        ("runtime/deferred/test_due.py",),
    ),
    Mutant(
        "norms-shard-bound",
        "runtime/deferred/partial_norms.py",
        "return [part[max(first, 0) : max(last, 0)] for first, last in ends]",
        "return [part[max(first, 0) : max(last - 1, 0)] for first, last in ends]",
        "the last entry that a rank has of a parameter is not in its norm",
        ("runtime/deferred/test_grads.py",),
    ),
    Mutant(
        "bucket-overwrites-residual",
        "runtime/layout/buckets.py",
        "if not self.residual_empty or slot.copied:",
        "if slot.copied:",
        "a large gradient that is copied in at once overwrites the residual",
        (
            "test_sparse.py",
            "runtime/layout/test_buckets.py",
        ),
    ),
    Mutant(
        "placement-fragments-together",
        "runtime/layout/placement.py",
        "kind = p.dtype, p.device, spread(p), of[name]",
        "kind = p.dtype, p.device, spread(p), 0",
        "a bucket has parameters of several fragments",
        ("runtime/exchange/test_rounds.py",),
    ),
    Mutant(
        "placement-uncalled-modules",
        "runtime/layout/placement.py",
        "while modules[name] not in self.called and name:",
        "while not self.called and name:",
        "no one updates the parameters of a module that is never called",
        (
            "test_replica.py",
            "test_frozen.py",
        ),
    ),
    Mutant(
        "checksum-in-32-bits",
        "runtime/guards/checksum.py",
        "sums = words[:rows].view(-1, COLUMNS).sum(0, dtype=torch.int64)",
        "sums = words[:rows].view(-1, COLUMNS).sum(0, dtype=torch.int32).long()",
        "an even number of changed signs is not seen",
        ("runtime/guards/test_checksum.py",),
    ),
    Mutant(
        "scales-never-refused",
        "runtime/guards/scales.py",
        "self._differ = known * squares != total * total",
        "self._differ = False and squares != total * known",
        "GradScalers with unlike scales are not refused",
        ("runtime/guards/test_scales.py",),
    ),
    Mutant(
        "nonfinite-never-refused",
        "runtime/guards/nonfinite.py",
        """\
        if not self.ranks:
            return
        found = self._transport.gather_objects""",
        """\
        if self.ranks is not None:
            return
        found = self._transport.gather_objects""",
        "a step with gradients that are not finite is taken",
        ("test_sparse.py",),
    ),
    Mutant(
        "undo-drops-always",
        "runtime/guards/undo.py",
        "if before is None or bool((self._checksum() == before).all()):",
        "if before is None:",
        "the residual is dropped, though parameters came to be what they were",
        ("runtime/guards/test_undo.py",),
    ),
    Mutant(
        "adam-share",
        "runtime/optimizer/momentum.py",
        "return factor, 1.0 - factor\n",
        "return factor, 1.0\n",
        "momentum correction takes gradients in whole, where Adam takes 1 - beta",
        ("runtime/optimizer/test_momentum.py",),
    ),
    Mutant(
        "checkpoint-waiting-residual",
        "runtime/layout/buckets.py",
        "return own.add_(slot.shaped(parts[FLAT])) if FLAT in parts else own",
        "return own",
        "the residual of what no rank trains is not saved",
        ("test_frozen.py",),
    ),
    Mutant(
        "join-mean-over-all",
        "runtime/join.py",
        "return self.join.counts",
        "return True",
        "the mean is also over ranks that have joined",
        ("runtime/test_join.py",),
    ),
    Mutant(
        "hooks-second-gradient",
        "runtime/hooks.py",
        """\
    if bucket.stage is Stage.SENT:
        raise""",
        """\
    if bucket.stage is None:
        raise""",
        "a second gradient after its bucket has left is lost without a word",
        ("test_replica.py",),
    ),
    Mutant(
        "training-skipped-steps",
        "runtime/training.py",
        "            self.num_skipped += 1\n",
        "",
        "a step that nobody took is not counted",
        (
            "test_replica.py",
            "test_metrics.py",
        ),
    ),
    Mutant(
        "actions-order-of-rank-0",
        "runtime/actions.py",
        "self.placement.follow(next(filter(None, orders)))",
        "self.placement.follow(orders[self.engine.group.rank])",
        "each rank's buckets follow its own order",
        ("test_replica.py",),
    ),
    Mutant(
        "session-optimizer-agreed",
        "session.py",
        """\
            self.apply_pending()
            self._agree_on(optimizer)
            if not self""",
        """\
            self.apply_pending()
            if not self""",
        "an optimizer that some rank cannot use is begun with",
        ("test_parallel.py",),
    ),
    Mutant(
        "session-no-sync-ends",
        "loop.py",
        "            self.be_quiet(quiet)\n",
        "            self.be_quiet(True)\n",
        "after no_sync() nothing is exchanged any more",
        ("test_loop.py",),
    ),
    Mutant(
        "updates-zeroed-since",
        "runtime/deferred/updates.py",
        """\
            elif deferred.zeroed:  # since step()
                mean.zero_()
""",
        "",
        "a gradient that was zeroed after step() comes back",
        (
            "test_replica.py",
            "runtime/deferred/test_grads.py",
        ),
    ),
    Mutant(
        "updates-not-wanted",
        "runtime/deferred/updates.py",
        "elif deferred.slot.wanted:",
        "elif mean is not None:",
        "a gradient that the program has taken away is stepped from",
        (
            "test_replica.py",
            "runtime/deferred/test_grads.py",
        ),
    ),
    Mutant(
        "tally-norms-of-a-slot",
        "runtime/deferred/tally.py",
        "squares |= dict.fromkeys(unused, 0.0)",
        "squares |= {}",
        "the norm counts what no rank has used",
        ("runtime/deferred/test_grads.py",),
    ),
    Mutant(
        "gradient-info-edited",
        "runtime/deferred/gradient_info.py",
        "            self._versions = _EDITED\n",
        "            pass\n",
        "the norm of a gradient that was edited is that of before",
        ("runtime/deferred/test_grads.py",),
    ),
    Mutant(
        "deferred-step-learning-rate",
        "runtime/optimizer/deferred_step.py",
        "{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}",
        "{k: v for k, v in group.items()}",
        "a learning rate that is a tensor changes between step() and the update",
        ("runtime/test_optimizers.py",),
    ),
    Mutant(
        "optimizer-copy-states",
        "runtime/optimizer/optimizer_copy.py",
        "if len(alike) < COUNT:",
        "if len(alike) < 1:",
        "one parameter of each kind is tried out, which no other can change",
        ("runtime/optimizer/test_probing.py",),
    ),
    Mutant(
        "ignored-parameters",
        "runtime/layout/parameters.py",
        "return ((n, p) for n, p in model.named_parameters() if n not in ignored)",
        "return ((n, p) for n, p in model.named_parameters() if n or ignored)",
        "what DDP is told to ignore is averaged",
        ("test_parallel.py",),
    ),
    Mutant(
        "validation-ranks-agree",
        "runtime/guards/validation.py",
        "            if ours != theirs:\n",
        "            if ours is not ours:\n",
        "ranks with other models are not refused",
        ("test_refusals.py",),
    ),
    Mutant(
        "consensus-untrained",
        "runtime/exchange/consensus.py",
        "slot.used = self._trained.get(slot.param, True)",
        "slot.used = True",
        "what no rank trains moves by its residual",
        ("test_frozen.py",),
    ),
    Mutant(
        "gradients-copied-in",
        "runtime/exchange/gradients.py",
        "        bucket.copy_in()\n",
        "",
        "small gradients, which are copied when a bucket is full, are not exchanged",
        ("runtime/test_join.py",),
    ),
    Mutant(
        "round-state-changed",
        "runtime/exchange/round_state.py",
        'consensus.changed = {named[name] for name in own.get("changed", named)}',
        "consensus.changed = set()",
        "what a rank has changed in a round is forgotten when it is loaded",
        ("runtime/exchange/test_rounds.py",),
    ),
    Mutant(
        "unpreconditioned-plan",
        "runtime/exchange/unpreconditioned.py",
        "return self._placement.buckets",
        "return self._placement.buckets[::-1]",
        "buckets leave from the last to the first",
        ("test_replica.py",),
    ),
    Mutant(
        "preconditioned-rates",
        "runtime/exchange/preconditioned.py",
        'p: float(group.get("lr", 1.0)) / by',
        "p: 1.0 / by",
        "K-FAC clips without the learning rate",
        (
            "kfac/test_product.py",
            "kfac/test_preconditioner.py",
        ),
    ),
    Mutant(
        "members-outside",
        "runtime/members.py",
        "inside, counts, shadowing, source = False, True, False, 0",
        "inside, counts, shadowing, source = False, True, True, 0",
        "outside of join() ranks abstain from the checks",
        (
            "runtime/test_join.py",
            "runtime/guards/test_checksum.py",
        ),
    ),
    Mutant(
        "saving-order",
        "runtime/saving.py",
        """\
        for part, own in zip(parts, found, strict=True):
            part.load(own)
""",
        """\
        for part, own in zip(parts[:1], found, strict=False):
            part.load(own)
""",
        "of what is saved the first part alone is loaded",
        ("runtime/test_checkpoint.py",),
    ),
    Mutant(
        "metrics-since-the-call-before",
        "runtime/metrics.py",
        "new = {name: total - before[name] for name, total in self._counted.items()}",
        (
            "new = {name: total + 0 * before[name] for name, total in "
            "self._counted.items()}"
        ),
        "numbers are of all steps so far",
        ("test_metrics.py",),
    ),
    Mutant(
        "uneven-within-another",
        "uneven.py",
        '"in one call, as join(also=[...])": bool(Join.inside),',
        '"in one call, as join(also=[...])": False,',
        "join() inside of another waits for ever",
        ("runtime/test_join.py",),
    ),
    Mutant(
        "ddp-arguments-mesh",
        "ddp_arguments.py",
        "    if mesh.ndim != 1:\n",
        "    if mesh.ndim < 1:\n",
        "a mesh of two dimensions is taken for its first",
        ("test_ddp_arguments.py",),
    ),
    Mutant(
        "installing-undone",
        "installing.py",
        "        undo.callback(setattr, place, name, getattr(place, name))\n",
        "",
        "what was installed stays when it is closed",
        (
            "integrations/test_accelerate.py",
            "test_run.py",
        ),
    ),
    # - kfac ---------------------------------------------------------------------------
    Mutant(
        "kfac-scale-not-squared",
        "kfac/statistics.py",
        "weight / self._scale**2",
        "weight / self._scale",
        "factors, which are squares of gradients, are divided by the scale once",
        (
            "kfac/test_scaler.py",
            "kfac/test_statistics.py",
        ),
    ),
    Mutant(
        "kfac-pi",
        "kfac/invert.py",
        "return pi * root, root / pi",
        "return root / pi, pi * root",
        "the dampings of both factors are swapped",
        ("kfac/test_invert.py",),
    ),
    Mutant(
        "kfac-no-clip",
        "kfac/invert.py",
        ".sqrt().clamp(max=1.0)",
        ".sqrt()",
        "small steps are made longer, up to what the clip allows",
        ("kfac/test_invert.py",),
    ),
    Mutant(
        "kfac-stale-factor",
        "kfac/preconditioner.py",
        """\
            if (layer, bucket.kind) not in self._arrived:
                view.zero_()
""",
        "            assert (layer, bucket.kind) and view is not None\n",
        "a layer that was not used sends its factor of an earlier step",
        ("kfac/test_equality.py",),
    ),
    Mutant(
        "kfac-parts-of-owners",
        "kfac/buckets.py",
        "by_owner.sort(key=lambda layer: owners[layer, kind])",
        "by_owner.sort(key=lambda layer: layer.name)",
        "factors go to ranks that do not own them",
        ("kfac/test_equality.py",),
    ),
    Mutant(
        "kfac-decay",
        "kfac/curvature.py",
        "rest, counts = 1 - self.config.decay, (float(told[0, 0]), float(size))",
        "rest, counts = self.config.decay, (float(told[0, 0]), float(size))",
        "running factors keep the share that they should lose",
        (
            "kfac/test_preconditioner.py",
            "kfac/test_factors.py",
        ),
    ),
    Mutant(
        "kfac-own-product",
        "kfac/sharing.py",
        """\
            self._curvatures[layer].complete()
        if self._products.pieces:
            self._adopt()""",
        """\
            self._curvatures[layer].complete()
        if not self._products.pieces:
            self._adopt()""",
        "new inverses are used a step early, or never",
        ("kfac/test_equality.py",),
    ),
    Mutant(
        "kfac-inverses-of-old-factors",
        "kfac/config.py",
        "bool(every % max(factors, 1))",
        "every < factors",
        "inverses between factors, of which nothing is new, are not refused",
        (
            "test_scheme.py",
            "test_refusals.py",
            "kfac/test_preconditioner.py",
        ),
    ),
    # - planner ------------------------------------------------------------------------
    Mutant(
        "ring-without-latency",
        "planner/clock/cost.py",
        "return inside * intra.alpha + between * inter.alpha + nbytes * beta",
        "return inside * 0 + between * 0 + nbytes * beta",
        "a ring's messages start for nothing",
        ("planner/clock/test_cost.py",),
    ),
    Mutant(
        "limit-of-dear",
        "planner/clock/limits.py",
        "forward, second = max(forward, second), 0.0",
        "forward, second = forward + second, 0.0",
        "the second half does not hide in the forward",
        ("planner/clock/test_limits.py",),
    ),
    Mutant(
        "network-scaled-backwards",
        "planner/network.py",
        "factor = (self.rate or 8 / (ring.beta or 1.0)) / rate",
        "factor = rate / (self.rate or 8 / (ring.beta or 1.0))",
        "a faster link takes longer",
        ("planner/test_network.py",),
    ),
    Mutant(
        "sim-optimizer-once",
        "planner/steps/actions.py",
        "seconds = sum(unit.optimizer for unit in self._units(bucket))",
        "seconds = self.trace.optimizer",
        "each bucket of a deferred step takes the whole optimizer's time",
        (
            "planner/test_virtual.py",
            "planner/test_order.py",
        ),
    ),
    Mutant(
        "sim-backward-order",
        "planner/steps/training.py",
        """\
            self._of[place].missing -= 1
            self._expect(left)
            self._step.full()
""",
        """\
            self._of[place].missing -= 1
            self._expect(left)
""",
        "buckets wait for the end of backward",
        (
            "planner/test_order.py",
            "planner/test_virtual.py",
        ),
    ),
    Mutant(
        "sim-flags",
        "planner/steps/exchange.py",
        "return SimSteps(passes, BEFORE, (size + COUNT + 1, 1 + num_units))",
        "return SimSteps(passes, BEFORE, (size + COUNT + 1, 0))",
        "steps begin without asking whether parameters are alike",
        ("planner/steps/test_steps_exchange.py",),
    ),
    Mutant(
        "sketch-of-a-rank",
        "planner/clock/symbolic_requests.py",
        "rest = (peer ^ group.rank,)",
        "rest = (peer,)",
        "a swap is sketched with the peer of another rank",
        ("planner/clock/test_symbolic_requests.py",),
    ),
    Mutant(
        "document-version",
        "planner/data/document.py",
        'if (version := found.pop("version", None)) != VERSION:',
        'if (version := found.pop("version", None)) is None:',
        "a file of a later version is read",
        (
            "planner/test_network.py",
            "test_refusals_cli.py",
        ),
    ),
    Mutant(
        "sim-inversion-queue",
        "planner/steps/parts.py",
        "begin = max(self._free[rank], now)",
        "begin = now",
        "a rank inverts all its factors at once",
        ("planner/steps/test_curvature.py",),
    ),
    # - fusion -------------------------------------------------------------------------
    Mutant(
        "fusion-lone-small-bucket",
        "fusion/formulas.py",
        "full = filled > least and filled + n > limit",
        "full = filled > 0 and filled + n > limit",
        "little that comes before a large tensor has a bucket of its own",
        (
            "fusion/test_fusion_sizes.py",
            "runtime/layout/test_buckets.py",
        ),
    ),
    Mutant(
        "fusion-search-away",
        "fusion/search.py",
        "if known[left] <= known[right]:",
        "if known[left] >= known[right]:",
        "the search goes on beside the slower size",
        ("fusion/test_fusion_search.py",),
    ),
    # - scheme -------------------------------------------------------------------------
    Mutant(
        "scheme-momentum-twice",
        "scheme/config.py",
        '"leave out momentum_correction": (local and takes_momentum_over(scheme)),',
        '"leave out momentum_correction": False,',
        "momentum correction of steps, which have the momentum, is not refused",
        ("test_scheme.py",),
    ),
    Mutant(
        "parser-given-twice",
        "scheme/parser.py",
        "            if name in named:\n",
        "            if name is None:\n",
        "an argument that is given twice is read, and the last one counts",
        ("test_scheme.py",),
    ),
    Mutant(
        "respelled-suffix",
        "scheme/spelling.py",
        'kind = "schedule" if suffix in ("dear", "local") else "wire"',
        'kind = "schedule" if suffix == "dear" else "wire"',
        "an old name's schedule is read as a wire",
        ("test_scheme.py",),
    ),
    # - integrations -------------------------------------------------------------------
    Mutant(
        "ddp-hook-forgets",
        "integrations/ddp.py",
        "own_bucket.carry(before, same=True)",
        "pass",
        "where DDP cuts buckets anew the residual is lost",
        ("integrations/test_ddp.py",),
    ),
    Mutant(
        "states-of-more-ranks",
        "integrations/states.py",
        "for other in range(rank, before, size):",
        "for other in range(rank, size):",
        "fewer ranks than saved leave the residuals of the others behind",
        ("integrations/test_states.py",),
    ),
    Mutant(
        "meter-of-all-steps",
        "integrations/metrics.py",
        "found[name] /= steps",
        "found[name] /= 1",
        "a logger is told sums, and not numbers of a step",
        ("integrations/test_states.py",),
    ),
    # - lab ----------------------------------------------------------------------------
    Mutant(
        "lab-teardown",
        "lab/launch.py",
        "            guard.communicate()\n",
        "            pass\n",
        "what does not heed SIGTERM outlives the run",
        (
            "lab/test_launch.py",
            "lab/test_endings.py",
        ),
    ),
    Mutant(
        "lab-deferred-twice",
        "lab/summary.py",
        "forward=forward - waited[0] - deferred,",
        "forward=forward - waited[0],",
        "an update in the forward counts as forward, too",
        ("lab/test_summary.py",),
    ),
    Mutant(
        "lab-speedup",
        "lab/summary.py",
        "speedup_over_ddp=base / r.step_seconds",
        "speedup_over_ddp=r.step_seconds / base",
        "a faster scheme has a speed-up below 1",
        ("lab/test_summary.py",),
    ),
    Mutant(
        "main-without-extra",
        "__main__.py",
        'require("cli", "typer", "rich")',
        'require("cli", "typer")',
        "where rich is missing there is a traceback",
        ("test_refusals_cli.py",),
    ),
    Mutant(
        "lab-exit-code",
        "lab/options.py",
        "raise Exit(1 if isinstance(error, LabError) else 2) from None",
        "raise Exit(1) from None",
        "what the user can put right has the exit code of a failure",
        ("test_refusals_cli.py",),
    ),
    Mutant(
        "lab-timeout",
        "lab/cli.py",
        "if timeout is not None and not 0 < timeout < math.inf:",
        "if timeout is not None and math.isnan(timeout):",
        "--timeout 0 is taken",
        ("test_refusals_cli.py",),
    ),
    Mutant(
        "lab-file-left",
        "lab/checks.py",
        "            path.unlink()\n",
        "            pass\n",
        "looking whether a file can be written leaves it behind",
        ("test_refusals_cli.py",),
    ),
    Mutant(
        "lab-networks-left",
        "lab/namespaces.py",
        """\
        holder.kill()  # takes the holder with it (--kill-child), and that all others
        holder.communicate()
""",
        "        globals().setdefault('kept', []).append(holder)\n",
        "networks, and what runs in them, outlive a run",
        (
            "lab/test_launch.py",
            "lab/test_endings.py",
        ),
    ),
    Mutant(
        "lab-tables-cut",
        "lab/tables.py",
        'number = partial(Column, justify="right", no_wrap=True)',
        'number = partial(Column, justify="right", no_wrap=True, width=3)',
        "numbers are cut off",
        ("lab/test_report.py",),
    ),
    Mutant(
        "lab-talker-rate",
        "lab/talker.py",
        "return (total - cold) * 8 / (now - warm)",
        "return (total - cold) / (now - warm)",
        "a link's rate is told in bytes",
        ("lab/test_probe.py",),
    ),
    Mutant(
        "lab-worker-loopback",
        "lab/worker.py",
        'contestants.append(Contestant("compute alone", own, own.model))',
        'contestants.insert(0, Contestant("compute alone", own, own.model))',
        "what computes alone is taken for the first contestant",
        ("lab/test_compare.py",),
    ),
    Mutant(
        "digits-twice",
        "lab/workloads/digits.py",
        "first = (position * size + rank) * batch_size",
        "first = position * size * batch_size",
        "all ranks train on the same images",
        ("lab/test_workloads.py",),
    ),
    Mutant(
        "synthetic-separation",
        "lab/workloads/synthetic.py",
        (
            "return draw(points, stream(TRAIN, seed, rank, step), batch_size "
            "or BATCH_SIZE)"
        ),
        "return draw(points, stream(TRAIN, seed, 0, step), batch_size or BATCH_SIZE)",
        "all ranks train on the same samples",
        ("lab/test_workloads.py",),
    ),
    Mutant(
        "replay-shares",
        "lab/workloads/timing.py",
        "return [Timing(s * FORWARD_SHARE, s * (1 - FORWARD_SHARE)) for s in seconds]",
        "return [Timing(s * (1 - FORWARD_SHARE), s * FORWARD_SHARE) for s in seconds]",
        "a replayed forward takes as long as a backward should",
        ("lab/test_replay.py",),
    ),
    # - doctor, profile and simulate ---------------------------------------------------
    Mutant(
        "threads-none",
        "profile/device.py",
        "if not 1 <= threads <= THREADS:",
        "if not 0 <= threads <= THREADS:",
        "a profile with 0 threads is begun",
        (
            "test_refusals_cli.py",
            "profile/test_trace_run.py",
        ),
    ),
    Mutant(
        "trace-report-order",
        "profile/trace/report.py",
        "for i in sorted(most[:rows]):",
        "for i in most[:rows]:",
        "units come by their time, not as their gradients get ready",
        ("profile/test_trace_report.py",),
    ),
    Mutant(
        "simulate-rates",
        "simulate/cli.py",
        'tried = [limited(rate, none) for rate in rates.split(",")] if rates else []',
        "tried = []",
        "--rates is read by nobody",
        ("simulate/test_grid.py",),
    ),
    Mutant(
        "simulate-report",
        "simulate/report.py",
        "table.add_row(scheme, *(_entry(grid, scheme, n, rate) for n in grid.ranks))",
        (
            "table.add_row(scheme, *(_entry(grid, scheme, n, rate) for n in "
            "grid.ranks[:1]))"
        ),
        "a table lacks all ranks but the first number",
        ("simulate/test_grid.py",),
    ),
    Mutant(
        "doctor-exit",
        "doctor/cli.py",
        '    _leave("", int(failed))',
        '    _leave("", 0)',
        "the doctor's exit code is 0 where training would fail",
        ("doctor/test_run.py",),
    ),
    Mutant(
        "doctor-two-of-a-rank",
        "doctor/meeting.py",
        'if self.store.add(f"came/{place.rank}", 1) > 1:',
        'if self.store.add(f"came/{place.rank}", 1) > 2:',
        "two processes with one rank are not noticed",
        ("doctor/test_meeting.py",),
    ),
    Mutant(
        "doctor-verdict",
        "doctor/report.py",
        'failures = sum(finding.level == "failure" for finding in found.findings)',
        "failures = 0",
        "the verdict is that training can start, whatever was found",
        ("doctor/test_run.py",),
    ),
    Mutant(
        "doctor-trial",
        "doctor/trial.py",
        "if int(ones) != place.size:",
        "if int(ones) == place.size:",
        "a group that works is told not to",
        ("doctor/test_run.py",),
    ),
    # - checkpoint ---------------------------------------------------------------------
    Mutant(
        "checkpoint-renamed-before-it-is-there",
        "checkpoint/files.py",
        """\
                    file.flush()
                    os.fsync(file.fileno())
""",
        """\
                    file.flush()
""",
        "a file has its name before it is on the disk",
        ("checkpoint/test_files.py",),
    ),
    Mutant(
        "checkpoint-sum-of-what-was-saved",
        "checkpoint/files.py",
        "    if crc32(state) != total:\n",
        "    if False:\n",
        "what was changed since is loaded",
        ("checkpoint/test_files.py",),
    ),
    Mutant(
        "checkpoint-removed-before-all-have-it",
        "checkpoint/writer.py",
        "    done = sorted(step for number, step in saved if number <= whole)\n",
        "    done = sorted(step for number, step in saved)\n",
        "a generation goes before all ranks have a later one whole",
        ("checkpoint/test_writer.py",),
    ),
    Mutant(
        "checkpoint-runs-are-mixed",
        "checkpoint/generations.py",
        "    return Generation(step, run, size), name_of(kind, rank)\n",
        '    return Generation(step, "", size), name_of(kind, rank)\n',
        "of a step some ranks read what another run has saved",
        ("checkpoint/test_generations.py",),
    ),
    Mutant(
        "checkpoint-lost-without-a-new-disk",
        "checkpoint/generations.py",
        "len(plan.lost) <= new",
        "True",
        "a residual is lost although its file may be found",
        ("checkpoint/test_generations.py",),
    ),
    Mutant(
        "checkpoint-whole-before-its-copy",
        "checkpoint/writer.py",
        """\
            self._copies.send(f"{under}/{name_of('rank', self._rank)}")
        except""",
        """\
            name = f"{under}/{name_of('rank', self._rank)}"
            self._pool.submit(self._copies.send, name)
        except""",
        "a save counts as whole although no neighbour has a copy yet",
        ("checkpoint/test_copies.py",),
    ),
    Mutant(
        "checkpoint-copy-of-an-earlier-run",
        "checkpoint/copies.py",
        "            return self._folder.seal(name) == (size, seal)\n",
        "            return bool(self._folder.seal(name))\n",
        "a neighbour keeps what another run has saved of the step",
        ("checkpoint/test_copies.py",),
    ),
    Mutant(
        "checkpoint-saved-once-by-some",
        "checkpoint/elastic.py",
        "            self._counted = max(writer.whole, default=0)\n",
        "            pass\n",
        "what a loss has interrupted is not saved before the next is due",
        ("test_elastic_checkpoints.py",),
    ),
    Mutant(
        "checkpoint-groups-are-mixed",
        "checkpoint/elastic.py",
        "max(words.run for words in told)",
        "keeper._run or max(words.run for words in told)",
        "a file of a rank that was lost counts as one of the group after it",
        ("test_elastic_checkpoints.py",),
    ),
    Mutant(
        "checkpoint-one-that-comes-has-its-own",
        "checkpoint/elastic.py",
        """                subject.items.load(run["items"])
""",
        "                pass\n",
        "the scheduler of a rank that comes begins anew",
        ("test_elastic_checkpoints.py",),
    ),
    Mutant(
        "checkpoint-copy-on-the-same-host",
        "checkpoint/neighbours.py",
        "[*hosts[number + 1 :], *hosts[:number]]",
        "[*hosts[number:], *hosts[:number]]",
        "a copy is lost with the host of its rank",
        ("checkpoint/test_neighbours.py",),
    ),
    Mutant(
        "checkpoint-copy-that-changed",
        "checkpoint/files.py",
        "    if summed != total or end != seal:\n",
        "    if end != seal:\n",
        "a neighbour keeps what has changed on its way",
        ("checkpoint/test_copies.py",),
    ),
    Mutant(
        "checkpoint-a-stop-heard-early",
        "session.py",
        "        return self.notices.settled if deferred else self.notices.last\n",
        "        return self.notices.last\n",
        "a rank that reads a parameter stops a step before the others",
        ("runtime/test_notices.py",),
    ),
    Mutant(
        "checkpoint-random-numbers-of-numpy",
        "checkpoint/contents.py",
        """\
        import numpy

        numpy.random.set_state(_of_numpy(saved["numpy"]))
""",
        """\
        pass
""",
        "NumPy's random numbers begin anew",
        ("checkpoint/test_contents.py",),
    ),
    Mutant(
        "checkpoint-lossy-is-no-remedy",
        "checkpoint/generations.py",
        "    if partly:\n        without",
        "    if True:\n        without",
        "who has no file of the model is told to go on without some",
        ("checkpoint/test_generations.py",),
    ),
    Mutant(
        "elastic-counts",
        "runtime/regroup.py",
        "    own.numbers, own.counts, _ = told[source]\n",
        "    own.numbers = told[source][0]\n",
        "algorithms of ranks that lost another one count on from other steps",
        ("test_regrouping.py",),
    ),
    # - groups one after the other, and the page of an advice ------------------------
    Mutant(
        "generations-hooks",
        "transport/generations.py",
        "        sys.excepthook = _hooks[0]\n",
        "        pass\n",
        "each group of ranks puts its rank before errors once more",
        ("transport/test_transport_generations.py",),
    ),
    Mutant(
        "timeline-waiting",
        "planner/timeline.py",
        "    taken = union([*waited, *applied])\n",
        "    taken = applied\n",
        "a drawn forward goes on where it waits",
        ("planner/test_planner_timeline.py",),
    ),
    Mutant(
        "timeline-first-step",
        "planner/timeline.py",
        "    for _ in range(max(STEPS, 2 * scheme.schedule.every)):\n",
        "    for _ in range(1):\n",
        "the first step is drawn, which has nothing of the one before",
        ("planner/test_planner_timeline.py",),
    ),
    Mutant(
        "page-order-of-losses",
        "advise/drawings.py",
        "key=lambda name: -sooner[name][0])",
        "key=lambda name: sooner[name][0])",
        "what is soonest at the same loss comes last",
        ("advise/test_page.py",),
    ),
    # - What trials found --------------------------------------------------------------
    Mutant(
        "generations-count-goes-on",
        "transport/generations.py",
        "    count_groups_anew()\n",
        "",
        "a rank that has failed while a group was made looks for others elsewhere",
        ("transport/test_transport_generations.py",),
    ),
    Mutant(
        "generations-reads-wait",
        "transport/generations.py",
        "    limit_reads(host, int(port), seconds)\n",
        "",
        "a rank waits for ever for the store of one that is stopped",
        ("transport/test_transport_generations.py",),
    ),
    Mutant(
        "membership-runs-mixed",
        "core/membership.py",
        "m.standing.progress < there.progress or m.standing.run != there.run",
        "m.standing.progress < there.progress",
        "ranks of two runs that have come as far are taken for one run's",
        ("core/test_membership.py",),
    ),
    Mutant(
        "join-raises-in-backward",
        "runtime/join.py",
        """\
        if self.join.throws:
            self.announce(Event.FORWARD)
""",
        "        return\n",
        "an error of join() comes in a backward, and leaves its gradients",
        ("runtime/test_join.py",),
    ),
    Mutant(
        "due-forks-unwatched",
        "runtime/deferred/due.py",
        "            training.flush()\n",
        "            pass\n",
        "a forked process waits for an update that never comes",
        ("runtime/deferred/test_forks.py",),
    ),
    Mutant(
        "session-frozen-forgotten",
        "session.py",
        "with thawed(before.placement.places):",
        "with thawed(()):",
        "what is frozen when the optimizer is found is in no bucket any more",
        ("test_parallel.py",),
    ),
    Mutant(
        "optimizer-others-marked",
        "runtime/optimizer/deferred_step.py",
        "and not (self._others and id(p) in self._others)",
        "",
        "what another replica does to its part of an optimizer's state is an edit",
        ("test_parallel.py",),
    ),
    Mutant(
        "saving-held-in-part",
        "runtime/saving.py",
        "    if own or training.wanted:\n",
        "    if training.wanted:\n",
        "a residual is saved as it was before an exchange that is under way",
        ("runtime/deferred/test_unexchanged.py",),
    ),
    Mutant(
        "clock-nothing-starved",
        "planner/clock/transport.py",
        "stretched(start, seconds, [(self.now, self._until)], longer / seconds)",
        "start + seconds",
        "bytes inside a host take as long while its ranks compute",
        ("planner/test_plan_transport.py",),
    ),
    # - without loss -------------------------------------------------------------------
    Mutant(
        "lossless-adds-in-another-order",
        "collectives/_lossless.py",
        "((rank + i) % size for i in range(1, size))",
        "((rank - i) % size for i in range(1, size))",
        "means have other bits than those of a ring",
        ("collectives/test_lossless_means.py",),
    ),
    Mutant(
        "lossless-own-mean-not-rounded",
        "collectives/_lossless.py",
        "        part.copy_(sent)\n",
        "        pass\n",
        "the owner of a part keeps what the cast takes off, and ranks differ",
        ("collectives/test_lossless_means.py",),
    ),
    Mutant(
        "lossless-zero-among-the-far",
        "wire/fast_lossless.py",
        "            if below < ZERO:\n                nibbles[at]",
        "            if below <= ZERO:\n                nibbles[at]",
        "an exponent 21 below the largest comes back as zero",
        ("wire/test_lossless.py",),
    ),
    Mutant(
        "lossless-first-half-of-a-block-alone",
        "wire/fast_lossless.py",
        "        low[whole * BLOCK :] = its[0, :short]\n",
        "        low[whole * BLOCK :] = its[0, 0]\n",
        "signs and mantissas at the end of a message are lost",
        ("wire/test_lossless.py",),
    ),
    Mutant(
        "plan-takes-coding-for-a-copy",
        "wire/lossless.py",
        "return COPIES if KERNELS.installed else COPIES * SLOWER",
        "return 1",
        "a plan has values encoded three times as fast as they are, or ninety times",
        ("wire/test_lossless.py",),
    ),
    Mutant(
        "plan-codes-on-a-gpu",
        "planner/search.py",
        "if network.device.beside or not",
        "if True or not",
        "a plan takes what nobody has timed on a GPU for as fast as a copy",
        ("planner/test_search.py",),
    ),
    # - far networks, and names of a class ---------------------------------------------
    Mutant(
        "far-sizes-as-time-allows",
        "planner/measuring/request_timing.py",
        "LONG * network.delay if far else 0.0",
        "0.0",
        "with little time, messages to far ranks are too short to tell a rate",
        ("planner/measuring/test_request_timing.py",),
    ),
    Mutant(
        "install-takes-a-base-class-its-name",
        "installing.py",
        "if module_name not in public and _derives(module):",
        "if False:",
        "a class that calls torch's by its name ends in a TypeError",
        ("test_parallel.py",),
    ),
    Mutant(
        "link-waits-for-all-of-a-room",
        "transport/link.py",
        "return 0 if self._short else len(self.due)",
        "return len(self.due)",
        "a thread sleeps until more bytes are here than are sent",
        ("transport/test_link.py",),
    ),
    Mutant(
        "request-sends-all-of-its-rows",
        "transport/gloo.py",
        "leaving = [row.flatten()[:numel] for row, numel in rows]",
        "leaving = [row.flatten() for row, numel in rows]",
        "what does not matter of a message travels, too",
        ("test_transport.py",),
    ),
)
