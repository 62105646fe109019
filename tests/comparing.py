"""The engine beside the oracle: how one is started, and how what both kept is compared."""

from oracle import differences

from nanobeacon import LLM

GREEDY = dict(temperature=0.0, ignore_eos=True)


def engine_for(folder, **options):
    return LLM(folder, dtype="float32", device="cpu", trace=True, **options)


def compare(oracle_result, output, tolerance=2e-5):
    """Kept positions and beacons equal up to near-ties, tokens equal as long as the caches are; how many
    evictions were compared."""
    hard, compared = differences(oracle_result.events, output.trace, tolerance)
    assert not hard, hard[:5]
    parted = compared < len(oracle_result.events)
    for wanted, got, margin in zip(
        oracle_result.token_ids, output.token_ids, oracle_result.margins, strict=True
    ):
        if wanted != got:
            assert parted or margin < 1e-3, f"{got} instead of {wanted}, which led by {margin}"
            break
    return compared
