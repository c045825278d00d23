"""What a hook of a few lines saves with ``torch.save``: a dict, a list of dicts (packs), or a dict of lists (rows).

Log-probs may be [B, L], [1, T] or [T] with bounds, lists of 1-D tensors, or nested tensors, under any of the names that
trainers use. xtuner's sequence-parallel parts are joined when their bounds prove how they belong together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rollout_is.dumps import aliases
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import torchfile
from rollout_is.dumps.foreign.format import Format, Harvest, Source
from rollout_is.dumps.foreign.hook_items import add_item, is_rectangle, read_rectangle, roles_of
from rollout_is.dumps.foreign.packed import Rows
from rollout_is.dumps.foreign.sequence_parallel import join_parts, join_sources
from rollout_is.dumps.foreign.sniff import Sniffed

if TYPE_CHECKING:
    from rollout_is.dumps.foreign.packed import Packed

_TRAIN = frozenset(aliases.REQUIRED["train"])
_ROLLOUT = frozenset(aliases.REQUIRED["rollout"])


class Hook(Format):
    """A torch file with both log-probs under known names, in any of the usual shapes."""

    name: ClassVar[str] = "torch-hook"
    priority: ClassVar[int] = 90
    takes_columns: ClassVar[bool] = True

    def claims(self, file: Sniffed) -> bool:
        """A torch file that names one log-prob of each side."""
        if file.kind != "torch" or "tensordict._reductions._make_td" in file.names:
            return False
        return bool(file.keys & _TRAIN) and bool(file.keys & _ROLLOUT)

    def harvest(self, files: Sequence[Sniffed]) -> Harvest:
        """Each file is a shard, except sequence-parallel parts, which are joined."""
        return join_sources(files)

    def read(self, source: Source) -> Packed:
        """The packs, rows or rectangle of a file."""
        where = source.path.name
        loaded = [torchfile.load(part, part.name) for part in source.parts]
        content = loaded[0] if len(loaded) == 1 else join_parts([items_of(one, where) for one in loaded], where)
        columns = dict(source.columns)
        if isinstance(content, Mapping) and is_rectangle(content, where, columns):
            packed = read_rectangle(content, where, columns)
        else:
            items = items_of(content, where)
            rows = Rows(where, _names(items[0], where, columns))
            for number, item in enumerate(items):
                add_item(
                    rows,
                    item,
                    where if len(items) == 1 else f"{where}[{number}]",
                    alone=len(items) == 1,
                    columns=columns,
                )
                if len(items) > 1 and _is_pack(item):
                    rows.close_pack()
            packed = rows.finish({})
        packed.metadata.update(_metadata(content))
        packed.dropped += _unused(content, packed)
        return packed


def items_of(content: Any, where: str) -> list[Mapping[str, Any]]:
    """The packs of a file: a list of dicts, or one dict.

    Raises:
        DumpError: anything else.
    """
    if isinstance(content, Mapping):
        return [content]
    if isinstance(content, list | tuple) and content and all(isinstance(item, Mapping) for item in content):
        return list(content)
    raise DumpError(
        where,
        f"expected a dict or a list of dicts of tensors, found {type(content).__name__}",
        "the hook saved another structure",
        "save a dict with train_logprobs, rollout_logprobs, response_mask and cu_seqlens",
        code="wrong-structure",
    )


def _is_pack(item: Mapping[str, Any]) -> bool:
    return any(name in item for name in (*aliases.OFFSETS, *aliases.LENGTHS))


def _names(item: Mapping[str, Any], where: str, columns: Mapping[str, str]) -> dict[str, str]:
    names = dict(roles_of(item, where, columns).columns)
    if "labels" in names:
        names["mask"] = f"{names.pop('labels')} != -100"
    names.pop("lengths", None)
    return names


def _unused(content: Any, packed: Packed) -> list[str]:
    item = content if isinstance(content, Mapping) else content[0]
    used = " ".join(packed.names.values()).split()
    known = {*aliases.OFFSETS, *aliases.LENGTHS, *aliases.FACTORS, "num_padding"}
    tensors = (k for k, v in item.items() if isinstance(k, str) and (hasattr(v, "dim") or isinstance(v, list | tuple)))
    return sorted(key for key in tensors if key not in used and key not in known and key not in packed.dropped)


def _metadata(content: Any) -> dict[str, str]:
    item = content if isinstance(content, Mapping) else content[0]
    places = {"step": ("step", "global_step", "global_steps", "rollout_id", "rollout_idx"), "rank": ("rank",)}
    found = {
        role: str(item[key])
        for role, keys in places.items()
        for key in keys
        if isinstance(item.get(key), int) and not isinstance(item[key], bool)
    }
    return found | _trainer(item)


def _trainer(item: Mapping[str, Any]) -> dict[str, str]:
    if "shifted_labels" in item:
        return {"trainer": "xtuner", "train_policy": "old"}
    known = {"old_log_probs": "old", "old_logprobs": "old", "prev_logprobs": "old", "old_per_token_logps": "old"}
    policy = next((policy for name, policy in known.items() if name in item), "")
    return {"train_policy": policy} if policy else {}
