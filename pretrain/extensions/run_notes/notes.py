"""Notes about a valid run: settings and data that may surprise the user."""

import itertools
import math
import os
import shutil
from pathlib import Path

from pretrain.active_extensions import advice_on
from pretrain.config.json_rates import Rate, rate_of
from pretrain.config.plan import Plan
from pretrain.config.schedule import rate_factor
from pretrain.data.data_spec import names_of_split, parse_split
from pretrain.data.open_datasets import SPLITS
from pretrain.data.samples.blend import BlendedSamples
from pretrain.data.samples.packed import PackedDocuments
from pretrain.errors import format_number
from pretrain.model.config import find_config, preset_names
from pretrain.model.init_methods import width_multiplier
from pretrain.model.own_models import is_model_code
from pretrain.model.tensor_core_sizes import size_notes

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "checkpoints/global_step*")
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")  # buffers of routers in transformers' modules
_PADDING = 256  # rows; vocabularies are often padded by up to this number of unused rows
# GPT-3, OPT, Llama, Pythia and OLMo have 0.01 to 0.1; Lion's authors advise up to 10 times as much (arXiv 2302.06675)
_LARGEST_WEIGHT_DECAY = 1.0
# The largest ratio of two batches for which the linear rule held: 256 to 8,192 images (arXiv 1706.02677, figure 1)
_LARGEST_RATIO = 32
_CRITICAL_TOKENS = round(2.1e8 * 3.0**-4.8)  # critical batch size at a loss of 3: arXiv 2001.08361, figure 10
_SMALLEST_TRAINING_PART = 0.9  # fraction of the tokens that the proportions of --split promise
_LARGEST_DROPOUT = 0.5  # as in the first paper on dropout (arXiv 1207.0580); transformers have 0 to 0.3
# GPT-3 was trained with the lowest rate in the last 13% of its steps (arXiv 2005.14165, appendix B)
_LONGEST_TAIL = 0.2  # fraction of the run
_LONGEST_TAIL_AT_0 = 0.01
_ALMOST_0, _LOW, _HIGH = 1e-3, 0.5, 0.3  # fractions of the highest rate
_SAME = 1e-9
_SHOULD_END = "a decay usually ends where the run ends"
_LOOKED_AT = 4000  # steps of a run whose rates are computed, evenly spread
_BEYOND = 64  # lengths of the run after which a schedule has ended



def run_notes(plan: Plan) -> tuple[str, ...]:
    """Return notes about a run: on its weights, vocabulary, epochs, evaluation, rates and speed."""
    return (*_unused_weights_notes(plan), *_vocabulary_notes(plan), *_padding_notes(plan), *_router_notes(plan),
            *_split_notes(plan), *_epoch_notes(plan), *_packing_notes(plan), *_evaluation_notes(plan),
            *_length_notes(plan), *rate_notes(plan), *_batch_notes(plan), *_recipe_notes(plan), *_speed_notes(plan),
            *_size_notes(plan), *_mup_notes(plan))


def _unused_weights_notes(plan: Plan) -> list[str]:
    """Note a --model with weights next to its config.json: the run starts from random weights."""
    model = plan.args.model
    if plan.args.init_from is not None or not model or model in preset_names() or is_model_code(model):
        return []
    folder = find_config(model).parent
    names = sorted(path.name for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not names:
        return []
    return [f"--model {model}: the folder holds weights ({names[0]}), which are not used: a new run starts from random "
            f"weights. --init_from {folder if Path(model).is_file() else model} starts from them"]


def _vocabulary_notes(plan: Plan) -> list[str]:
    """Note a vocabulary that is far larger than tokenizer or data need: unused rows take memory and time."""
    used, size = plan.data_vocab_size, plan.model.vocab_size
    if used is None:
        return []
    if size - used <= max(_PADDING, used // 10):
        return []
    fits = f": --model_overrides vocab_size={-(-used // 64) * 64} makes it fit" if plan.args.init_from is None else ""
    owner = "tokenizer" if plan.tokenizer is not None else "data's tokenizer"
    return [f"the {owner} has {used:,} tokens and the model's vocabulary {size:,}, of which {size - used:,} are "
            f"never used{fits}"]


def _padding_notes(plan: Plan) -> list[str]:
    """Note a token of the data that is the padding token of transformers' module: its vector has no gradient."""
    token = plan.model.padding_token
    if token is None or token != plan.eod_token:
        return []
    return [f"the token {token}, which ends documents, is the model's pad_token_id: transformers does not train the "
            "vector of that token in the embedding. --model_overrides pad_token_id=N, with a token N that the data "
            "does not have, trains it"]


def _router_notes(plan: Plan) -> list[str]:
    """Note biases of routers that balance the experts: DeepSeek-V3's training moves them by rule, not by gradient."""
    names = [name.rpartition(".")[2] for name, _, _ in plan.model.named_buffers() if name.endswith(_ROUTER_BIASES)]
    if not names:
        return []
    return [f"{names[0]} of {len(names)} routers is not updated in training, as in transformers, and no auxiliary loss "
            "is added: nothing balances the load of the experts. A new run trains with a bias of zero, and --init_from "
            "keeps the bias of the weights"]


def _split_notes(plan: Plan) -> list[str]:
    """Note a training part of --split with far fewer tokens than its proportion: --split divides documents."""
    if plan.data.module is not None or (plan.data.valid and plan.data.test):
        return []
    own = {"valid": plan.data.valid, "test": plan.data.test}
    fractions = {name: fraction for name, fraction in zip(SPLITS, parse_split(plan.data.split), strict=True)
                 if not own.get(name)}
    tokens = {name: plan.datasets[name].num_tokens for name in fractions if name in plan.datasets}
    found, expected = (sizes["train"] / sum(sizes.values()) for sizes in (tokens, fractions))
    if found >= _SMALLEST_TRAINING_PART * expected:
        return []
    others = " and ".join(f"{name} {count:,}" for name, count in tokens.items() if name != "train")
    return [f"--split {plan.data.split} divides documents by their number: the training part has {found:.0%} of the "
            f"tokens ({others}). " + "; ".join([
                *advice_on("small_training_part"), "--document_separator of `ds-pretrain prepare` divides long ones"])]


def _epoch_notes(plan: Plan) -> list[str]:
    """Note sources that the run reads more than once, and phases of --blend_schedule that it does not reach."""
    samples, dataset = plan.length.samples, plan.datasets["train"]
    first, last = plan.args.first_sample, plan.args.first_sample + samples
    if not isinstance(dataset, BlendedSamples):
        epochs = samples / dataset.samples_per_epoch
        return [f"the run reads its training data {epochs:.1f} times"] if epochs > 1 else []
    repeated = [f"{source.sources[0].prefix.name} {epochs:.1f} times" for source, epochs in
                zip(dataset.datasets, dataset.epochs(first, last), strict=True) if epochs > 1]
    unused = [f"{source.sources[0].prefix.name}" for source, count in
              zip(dataset.datasets, dataset.counts_between(first, last), strict=True) if count == 0]
    late = [start for start, _ in dataset.schedule if start >= last]
    notes = [f"the run reads {_some(repeated)}"] if repeated else []
    notes += [f"the run reads no sample of {_some(unused)}"] if unused else []
    return notes + [f"--blend_schedule: the run ends before its weights from token {start * dataset.seq_length:,} on"
                    for start in late]


def _packing_notes(plan: Plan) -> list[str]:
    """Note which fraction of the positions of packed samples has a token."""
    dataset = plan.datasets["train"]
    parts = dataset.datasets if isinstance(dataset, BlendedSamples) else (dataset,)
    packed = [f"{part.sources[0].prefix.name} {part.utilization:.2%}" for part in parts
              if isinstance(part, PackedDocuments)]
    return [f"--packing best_fit: positions of the samples that have a token: {_some(packed)}"] if packed else []


def _some(items: list[str]) -> str:
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more sources" if len(items) > 8 else "")


def _evaluation_notes(plan: Plan) -> list[str]:
    names = names_of_split(plan.datasets, "valid")
    if not names:
        return ["no validation data: nothing is evaluated while training"]
    needed = plan.args.eval_steps * plan.layout.global_batch_size
    small = {name: samples for name in names if (samples := plan.datasets[name].samples_per_epoch) < needed}
    if not small:
        return []
    if names == ["valid"]:
        return [f"an evaluation of {needed} samples wraps around the {small['valid']} validation samples"]
    sets = ", ".join(f"{samples} of {name}" for name, samples in small.items())
    return [f"an evaluation reads {needed} samples of each validation set, and wraps around the {sets}"]


def _length_notes(plan: Plan) -> list[str]:
    """Note stages of --seq_length_schedule that are shorter than the last one, or that the run does not reach."""
    lengths, samples = plan.seq_lengths, plan.length.samples
    falls = [f"--seq_length_schedule: the sequences get shorter, from {before} to {after} tokens"
             for (_, before), (_, after) in itertools.pairwise(lengths.stages) if after < before]
    return falls + [f"--seq_length_schedule: the run ends before its sequences have {length} tokens"
                    for first, length in lengths.stages if first >= samples]


def _batch_notes(plan: Plan) -> list[str]:
    """Note stages of --batch_schedule that the run does not reach, and a scaled learning rate."""
    args, length, batch = plan.args, plan.length, plan.layout.global_batch_size
    end = args.first_sample + length.samples
    notes = [f"--batch_schedule: the run ends before its global batch has {size} samples"
             for first, size in length.batch_sizes.stages if first >= end]
    if args.lr_scaling is not None and args.lr_reference_batch is not None:
        rate = plan.get("optimizer.params.lr")
        factor = rate_factor(args.lr_scaling, batch=batch, reference_batch=args.lr_reference_batch)
        notes.append(f"--lr_scaling {args.lr_scaling}: the peak learning rate is {rate / factor:g} x {factor:g} = "
                     f"{rate:g}, for a global batch of {batch} instead of {args.lr_reference_batch}")
        notes += _scaling_range_notes(plan, batch / args.lr_reference_batch)
    return notes


def _scaling_range_notes(plan: Plan, ratio: float) -> list[str]:
    """Note where --lr_scaling is used beyond the range in which its rule is known to hold.

    Args:
        ratio: global batch of the run as a multiple of --lr_reference_batch.
    """
    if ratio == 1:
        return []
    scaling, optimizer = plan.args.lr_scaling, plan.layout.optimizer
    notes = []
    if (scaling == "linear") != (optimizer == "sgd"):
        known = "SGD (arXiv 1706.02677)" if scaling == "linear" else "Adam and RMSprop (arXiv 2205.10287)"
        other = "" if optimizer == "sgd" or scaling == "sqrt" else "; for Adam: --lr_scaling sqrt"
        other = "; for SGD: --lr_scaling linear" if optimizer == "sgd" else other
        notes.append(f"--lr_scaling {scaling}: this rule is known to hold for {known}, not for {optimizer}{other}")
    if not 1 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO:
        notes.append(f"--lr_scaling {scaling}: the batches differ by a factor of "
                     f"{format_number(max(ratio, 1 / ratio))}; the linear rule was found "
                     f"to hold up to {_LARGEST_RATIO}, and to fail beyond (arXiv 1706.02677); "
                     "tune the rate at a batch nearer to this one")
    tokens = round(max(1.0, 1 / ratio) * plan.layout.tokens_per_step)  # of the larger batch
    if tokens > _CRITICAL_TOKENS:
        notes.append(f"--lr_scaling {scaling}: it holds for batches below the critical batch size, beyond which the "
                     "best rate no longer grows with the batch, and with Adam falls (arXiv 1812.06162, 2405.14578). "
                     f"{tokens:,} tokens are above {_CRITICAL_TOKENS:,}, its estimate for a loss of 3 (arXiv "
                     "2001.08361); it grows as the loss falls: --noise_scale_interval measures it")
    return notes


def _recipe_notes(plan: Plan) -> list[str]:
    """Note a batch size that nobody chose, and regularization far beyond published recipes."""
    args, layout, model, notes = plan.args, plan.layout, plan.model, list[str]()
    chosen = (args.micro_batch_size, args.gradient_accumulation_steps, args.global_batch_size, args.batch_schedule,
              *(plan.file.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                                                   "train_batch_size")))
    if all(size in (None, "auto") for size in chosen):
        notes.append(f"no batch size is given: the global batch is {layout.global_batch_size} x {args.seq_length} "
                     "tokens, one sample a data-parallel rank; --global_batch_size and --micro_batch_size set it")
    decay = plan.get("optimizer.params.weight_decay", 0.0)
    limit = _LARGEST_WEIGHT_DECAY * (10 if layout.optimizer == "lion" else 1)
    if isinstance(decay, (int, float)) and decay > limit:
        rate = plan.get("optimizer.params.lr", 0.0)
        notes.append(f"weight decay {decay:g}: each step at the peak rate also shrinks the weights by "
                     f"{decay * rate:.2%}; published recipes have 0.01 to 0.1")
    dropouts = {"residual": model.residual_dropout, "attention": model.attention_dropout,
                "embedding": model.embedding_dropout}
    if high := [f"{name} {value:g}" for name, value in dropouts.items() if value > _LARGEST_DROPOUT]:
        notes.append(f"dropout of more than half of the values ({', '.join(high)}): published recipes have 0 to 0.1")
    return notes


def _speed_notes(plan: Plan) -> list[str]:
    """Note which faster operators cannot be used, and why."""
    notes, args, model = [], plan.args, plan.model
    notes += model.implementation.notes(plan)
    layout = plan.layout
    if plan.device.kind == "cuda" and layout.zero_stage == 2 and layout.data_parallel_size > 1 and \
            plan.get("zero_optimization.overlap_comm") is None:
        notes.append('zero_optimization.overlap_comm: DeepSpeed enables it at ZeRO-3 only; true reduces '
                     "gradients during the backward pass, with a second bucket")
    if plan.device.kinds:
        notes.append(f"the GPUs of this host differ: {', '.join(plan.device.kinds)}. The run is planned for the "
                     "smallest memory, and steps take as long as on the slowest GPU; CUDA_VISIBLE_DEVICES chooses "
                     "GPUs, by nvidia-smi's numbers if CUDA_DEVICE_ORDER is PCI_BUS_ID")
    if plan.device.kind == "cpu" and layout.precision == "bf16":
        if args.compile_blocks:
            notes.append("--compile_blocks on a CPU leaves out the attention and the GELU written for CPUs")
        if model.attention_dropout > 0:
            notes.append("attention dropout: torch's own attention is used, which is slower on CPUs in bf16")
        if model.activation == "gelu_tanh" and shutil.which(os.environ.get("CC", "cc")) is None:
            notes.append("no C compiler: torch's own GELU is used, which takes four times as long")
    return notes


def _size_notes(plan: Plan) -> list[str]:
    """Note sizes of the model that are slow on the tensor cores of a GPU."""
    layout = plan.layout
    if plan.device.kind != "cuda" or plan.args.init_from is not None:  # existing weights have these sizes
        return []
    return size_notes(plan.model, tensor_parallel_size=layout.tensor_parallel_size, element_bytes=layout.element_bytes)


def _mup_notes(plan: Plan) -> list[str]:
    """Note the learning rate that muP gives to matrices."""
    width = plan.args.mup_base_width
    if width is None:
        return []
    multiplier, rate = width_multiplier(plan.model, width), plan.get("optimizer.params.lr")
    return [f"muP: the model is {multiplier:g} times as wide as its base model; the peak learning rate of its "
            f"matrices, embeddings aside, is {rate / multiplier:g}, and that of all other parameters {rate:g}"]


def rate_notes(plan: Plan) -> list[str]:
    """Return notes about the rates of a run: a long end at the lowest rate, a warm-up or a decay that it cuts off."""
    flag = "the JSON's scheduler" if plan.schedule is None else f"--lr_schedule {plan.schedule.kind}"
    note = length_note(rate_of(plan), plan.train_steps)
    return [f"{flag}: {note}"] if note else []


def length_note(rate: Rate, steps: int) -> str:
    """Return what is unusual about the rates of a run of `steps` steps; "": nothing.

    `rate`: the rate of the next step, after so many updates.
    """
    sampled = sorted({round(index * (steps - 1) / _LOOKED_AT) for index in range(_LOOKED_AT + 1)})
    highest = max(map(rate, sampled))
    if highest <= 0:
        return f"the learning rate is 0 in all {steps:,} steps"
    last, first = rate(steps - 1), _first_of_end(rate, sampled)
    at_end = steps - first
    is_0 = last <= _ALMOST_0 * highest
    falls = first > 1 and rate(first - 2) > rate(first - 1) > last  # not one of several steps down
    allowed = _LONGEST_TAIL_AT_0 if is_0 else _LONGEST_TAIL
    if at_end > max(allowed * steps, 1) and (is_0 or (falls and last < _LOW * highest)):
        return f"the learning rate reaches its lowest value, {last:.3g}, at step {first + 1:,}, and {at_end - 1:,} " \
               f"of the {steps:,} steps follow with it ({at_end / steps:.0%}); {_SHOULD_END}"
    return _cut_off_note(rate, steps, highest)


def _first_of_end(rate: Rate, sampled: list[int]) -> int:
    """Return the number of updates after which all steps of the run have the rate of the last one."""
    last = rate(sampled[-1])

    def differs(done: int) -> bool:
        return not math.isclose(rate(done), last, rel_tol=_SAME, abs_tol=0)

    before = next((number for number in range(len(sampled) - 1, -1, -1) if differs(sampled[number])), None)
    if before is None:
        return 0
    return next(done for done in range(sampled[before + 1], sampled[before], -1) if differs(done - 1))


def _cut_off_note(rate: Rate, steps: int, highest: float) -> str:
    """Return a note if the run ends in the warm-up, or before most of a decay that ends later; else ""."""
    last, end = rate(steps - 1), rate(_BEYOND * steps)
    if last >= highest and rate(steps) > last:
        return f"the learning rate still rises when the run ends: it is {last:.3g} in the last step, {steps:,}, and " \
               f"{rate(2 * steps):.3g} would follow {steps:,} steps later; the warm-up is longer than the run"
    ended = math.isclose(end, rate(_BEYOND * steps - 1), rel_tol=_SAME, abs_tol=0)
    if steps > 1 and ended and end < _LOW * last and rate(steps - 2) > last > _HIGH * highest:
        return f"the run ends at step {steps:,} with the learning rate {last:.3g}, {last / highest:.0%} of the " \
               f"highest one, and before the decay to {end:.3g}; {_SHOULD_END}"
    return ""
