"""Says what is wrong with a group of stored tensors that doesn't make what it should."""

from collections import Counter
from collections.abc import Sequence

from transformers.core_model_loading import MergeModulelist

from workers.loading.checkpoint import list_some
from workers.loading.conversion import Conversion


def explain(
    conversion: Conversion,
    where: str,
    target: str,
    expected: tuple[int, ...],
    *,
    made: tuple[int, ...] | None = None,
) -> str:
    """One sentence that names the stored tensor at fault, as far as one can be told.

    The group made `target` of shape `made` instead of `expected`; None: it fits its converter so
    badly that it made nothing.
    """
    odd = _describe_odd(conversion, target)
    if odd is not None:
        return odd
    first, others = conversion.members[0][1], len(conversion.members) - 1
    if absent := _absent(conversion):
        return f"{where} lacks {list_some(absent)} beside {first.name}"
    if lacking := _lacking(conversion, expected):
        return f"{where} lacks {list_some(lacking)}"
    if surplus := _surplus(conversion, expected):
        return f"{where} has {list_some(surplus)}, but config.json counts to {expected[0] - 1}"
    named = f"{first.file}: {first.name}" + (f" and {others} others" if others else "")
    if made is None:
        return f"{named} can't be made into {target} of shape {list(expected)}"
    return f"{named} make {target} of shape {list(made)}, but config.json makes it {list(expected)}"


def are_numbered(conversion: Conversion) -> bool:
    """Whether merged members, such as experts, are those from 0 on: order alone pairs them."""
    if not _is_merged(conversion):
        return True
    numbers = _number_forms([stored.name for _, stored in conversion.members]).values()
    return all(each == set(range(len(each))) for each in numbers)


def _describe_odd(conversion: Conversion, target: str) -> str | None:
    """Members that match one pattern, such as experts, have one shape."""
    for pattern in conversion.converter.source_patterns:
        members = [stored for matched, stored in conversion.members if matched == pattern]
        shapes = Counter(stored.shape for stored in members).most_common()
        if len(shapes) > 1:
            (common, _), (rare, _) = shapes[0], shapes[-1]
            odd = next(stored for stored in members if stored.shape == rare)
            other = next(stored for stored in members if stored.shape == common)
            return (
                f"{odd.file}: {odd.name} has shape {list(rare)}, but {other.name}, which {target} "
                f"is made of too, {list(common)}"
            )
    return None


def _absent(conversion: Conversion) -> list[str]:
    """Patterns that no member matches."""
    matched = {pattern for pattern, _ in conversion.members}
    return [
        pattern.replace("\\", "").strip("^$")
        for pattern in conversion.converter.source_patterns
        if pattern not in matched
    ]


def _lacking(conversion: Conversion, expected: tuple[int, ...]) -> list[str]:
    """Names that would complete the numbers."""
    forms = _number_forms([stored.name for _, stored in conversion.members])
    count = max((number + 1 for numbers in forms.values() for number in numbers), default=0)
    if _is_merged(conversion):
        count = max(count, expected[0])
    return [
        form.replace("{}", str(number))
        for form, numbers in forms.items()
        for number in range(count)
        if number not in numbers
    ]


def _surplus(conversion: Conversion, expected: tuple[int, ...]) -> list[str]:
    if not _is_merged(conversion):
        return []
    forms = _number_forms([stored.name for _, stored in conversion.members])
    return [
        form.replace("{}", str(number))
        for form, numbers in forms.items()
        for number in sorted(numbers)
        if number >= expected[0]
    ]


def _is_merged(conversion: Conversion) -> bool:
    """Whether the target's first dimension counts the members."""
    return any(isinstance(step, MergeModulelist) for step in conversion.converter.operations)


def _number_forms(names: Sequence[str]) -> dict[str, set[int]]:
    """The numbers that tell members apart, by their names with a hole for it.

    {} where not exactly one part of the names is such a number.
    """
    split = [name.split(".") for name in names]
    counting = [
        place
        for place, parts in enumerate(zip(*split, strict=False))
        if len(set(parts)) > 1 and all(part.isdecimal() for part in parts)
    ]
    if len(counting) != 1:
        return {}
    place = counting[0]
    forms: dict[str, set[int]] = {}
    for parts in split:
        form = ".".join((*parts[:place], "{}", *parts[place + 1 :]))
        forms.setdefault(form, set()).add(int(parts[place]))
    return forms
