"""The constants of the systems: defaults by size, and every way to change them."""

import pytest

from recycle.core.errors import UserError
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS


@pytest.mark.parametrize(
    ("billions", "oobleck_s", "bamboo_s", "varuna_checkpoint_s", "varuna_restart_s"),
    [
        (0.1, 3, 100, 11.2, 78.7),
        (0.35, 3, 100, 11.2, 78.7),
        (2.7, 6, 230, 50, 515),
        (4.7, 8, 340, 85, 608),
        (6.7, 10, 450, 120, 701),
        (145.6, 10, 450, 120, 701),
    ],
)
def test_defaults_are_the_peers_own_figures_and_lie_between_them_for_other_sizes(
    billions, oobleck_s, bamboo_s, varuna_checkpoint_s, varuna_restart_s
):
    made = Constants.for_model(billions * 1e9)
    assert made.oobleck.reconfigure_us == oobleck_s * 10**6
    assert made.bamboo.rebalance_us == bamboo_s * 10**6
    assert made.varuna.checkpoint_us == pytest.approx(varuna_checkpoint_s * 10**6)
    assert made.varuna.restart_us + made.varuna.checkpoint_us == pytest.approx(varuna_restart_s * 10**6)


def test_one_constant_changes_and_no_other():
    before = Constants.for_model(1e9)
    after = before.with_values(["oobleck.reconfigure=57s", "recycle.moves=false", "ready=2m", "oobleck.faults=5"])
    assert after.oobleck.reconfigure_us == 57_000_000
    assert after.recycle.moves is False
    assert after.ready_us == 120_000_000
    assert after.oobleck.faults == 5
    assert after.bamboo == before.bamboo
    assert after.recycle.detect_us == before.recycle.detect_us


def test_a_hang_takes_as_long_as_a_system_has_a_time_out_for_it():
    made = Constants.for_model(1e9)
    seconds = {name: made.hang_us_of(name) / 10**6 for name in SYSTEMS}
    assert {seconds[name] for name in ("recycle", "recycle-rerouting", "elaswave", "resihp", "odyssey-rerouting")} == {10}
    assert {seconds[name] for name in ("oobleck", "varuna", "checkpoint-restart", "checkpoint-restart-spare")} == {600}
    assert (seconds["replica-drop"], seconds["ideal"], seconds["fault-scaled"]) == (60, 0, 0)
    changed = made.with_values(["hang=2m", "recycle.hang=3s"])
    assert (changed.hang_us_of("varuna"), changed.hang_us_of("recycle")) == (120_000_000, 3_000_000)


def test_a_file_has_a_table_for_each_system(tmp_path):
    path = tmp_path / "constants.toml"
    path.write_text('ready = "0s"\n[replica-drop]\nreconfigure = "30s"\n[recycle]\nmoves = false\nregroup = "2s"\n')
    made = Constants.for_model(1e9).with_file(path)
    assert (made.ready_us, made.replica_drop.reconfigure_us, made.recycle.moves) == (0, 30_000_000, False)
    assert made.recycle.regroup_us == 2_000_000


@pytest.mark.parametrize(
    ("pair", "named"),
    [
        ("oobleck", "system.name=value"),
        ("nobody.pause=1s", "nobody.pause"),
        ("oobleck.pause=1s", "reconfigure"),
        ("oobleck.reconfigure=57", "57"),
        ("oobleck.reconfigure=-1s", "-1s"),
        ("oobleck.faults=0", "oobleck.faults"),
        ("oobleck.faults=x", "oobleck.faults"),
        ("recycle.moves=maybe", "true or false"),
    ],
)
def test_what_is_no_constant_is_refused_by_name(pair, named):
    with pytest.raises(UserError, match=named):
        Constants.for_model(1e9).with_values([pair])


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    path = tmp_path / "constants.toml"
    path.write_text("[recycle\n")
    with pytest.raises(UserError, match="not TOML"):
        Constants.for_model(1e9).with_file(path)
    path.write_text("[oobleck]\nreconfigure = 57\n")
    with pytest.raises(UserError, match="duration"):
        Constants.for_model(1e9).with_file(path)
