"""What `jitckpt run` may be called with."""

import argparse

import pytest
from torch.distributed import run as torchrun

from jitckpt.cli.run_checks import check_config, check_modes, check_options
from jitckpt.cli.run_options import run_parser


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        run_parser().parse_args([*words, "train.py"])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--memory", "--objects-d", "--state"])
def test_the_scripts_own_arguments_are_no_abbreviations_of_ours(argument: str) -> None:
    args = run_parser().parse_args(["--memory-tier", "peer=3", "train.py", argument, "1"])
    assert args.training_script_args == [argument, "1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory-tier", "peers"], "'peers' is none of auto, off, peer, parity, peer=M"),
        (["--memory-every", "0"], "'0' is neither a number of steps from 1 to 2147483647 nor auto"),
        (["--memory-every", "often"], "'often' is neither"),
        (["--memory-limit", "0"], "'0' is not a whole number of MiB from 1 to 16777216"),
        (["--memory-keep", "-1"], "'-1' is not a number of seconds above 0"),
        (["--memory-interface", "no-such0"], "'no-such0' is neither a network interface of this host"),
        (["--failure-domains", "/no/such/file"], "/no/such/file can't be read"),
        (["--failure-domains", "/dev/null"], "/dev/null can't be read: it is no file"),
    ],
)
def test_wrong_values_of_the_memory_tiers_options_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert says in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("peer --mode transparent --snapshot-every 10", "not with --suspendable, --snapshot-every and"),
        ("peer --mode transparent --suspendable", "not with --suspendable"),
        ("auto --mode transparent --broken-device move", "not with --suspendable"),
        ("peer=3", "peer=3: each copy is on another host, and there is 1"),
        ("peer=4+optimizer --nnodes 3", "peer=4: each copy is on another host, and there are 3"),
        ("sharded --nnodes 3 --memory-spill /tmp", "--memory-spill: not with parity or sharded"),
        ("parity=3 --nnodes 3 --memory-spill /tmp", "--memory-spill: not with parity or sharded"),
    ],
)
def test_what_the_memory_tier_does_not_go_with_is_refused(words: str, says: str) -> None:
    args = run_parser().parse_args(["--memory-tier", *words.split(), "train.py"])
    with pytest.raises(ValueError, match=says):
        check_modes(args)


@pytest.mark.parametrize("words", ["peer", "peer=2", "peer=3 --nnodes 3", "peer --mode transparent"])
def test_what_it_goes_with_is_not(words: str) -> None:
    check_modes(run_parser().parse_args(["--memory-tier", *words.split(), "train.py"]))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nnodes 2", "goes with --snapshot-every"),
        ("--nnodes 2 --suspendable", "goes with --snapshot-every"),
        ("--snapshot-every 10 --standalone", "of 1 host 0 can have a copy of another one's part"),
        ("--snapshot-every 10 --nnodes 2", "--snapshot-copies 2: of 2 hosts 1 can have a copy"),
    ],
)
def test_copies_of_what_is_not_there_or_on_hosts_that_are_not_are_refused(words: str, says: str) -> None:
    args = run_parser().parse_args(
        ["--mode", "transparent", "--snapshot-copies", "2", *words.split(), "train.py"]
    )
    with pytest.raises(ValueError, match=says):
        check_modes(args)


@pytest.mark.parametrize(
    ("words", "meets"),
    [
        ("--node-rank 1 --master-addr 127.0.0.1", "127.0.0.1:29500"),  # two launchers on one machine
        ("--node-rank 1 --master-addr 127.0.0.1 --master-port 7", "127.0.0.1:7"),
    ],
)
def test_loopback_that_is_given_is_where_hosts_meet(words: str, meets: str) -> None:
    args = run_parser().parse_args(["--nnodes", "2", *words.split(), __file__])
    check_options(args, "softgpu")
    assert (args.rdzv_backend, args.rdzv_endpoint, args.fixed_place) == ("c10d", meets, 1)


@pytest.mark.parametrize("own", ["127.0.0.1", "localhost", "::1"])
def test_loopback_that_the_environment_names_is_no_more_than_torchs_default(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several hosts would each wait for the others at itself."""
    monkeypatch.setenv("PET_MASTER_ADDR", own)
    args = run_parser().parse_args(["--nnodes", "2", "--node-rank", "1", __file__])
    with pytest.raises(ValueError, match=rf"--nnodes 2 needs .*PET_MASTER_ADDR={own} is each host itself"):
        check_options(args, "softgpu")
    coordinated = "--nnodes 2 --rdzv-id job --coordination etcd://127.0.0.1"
    args = run_parser().parse_args([*coordinated.split(), __file__])
    check_options(args, "softgpu")
    assert args.rdzv_endpoint == "127.0.0.1:2379"


def test_a_first_host_that_the_environment_names_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MASTER_ADDR", "127.0.0.2")
    args = run_parser().parse_args(["--nnodes", "2", "--node-rank", "1", __file__])
    check_options(args, "softgpu")
    assert args.rdzv_endpoint == "127.0.0.2:29500"


def test_where_no_first_host_is_given_there_is_none() -> None:
    args = run_parser().parse_args(["--nnodes", "2", "--node-rank", "1", __file__])
    with pytest.raises(ValueError, match=r"--nnodes 2 needs --rdzv-backend c10d .* or --master-addr HOST"):
        check_options(args, "softgpu")
    args = run_parser().parse_args([__file__])
    check_options(args, "softgpu")
    assert args.master_addr == "127.0.0.1"


def test_a_number_of_copies_is_a_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'-1' is no whole number from 0 on" in refused(capsys, "--snapshot-copies", "-1")


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan"])
def test_how_long_hosts_are_waited_for_is_a_number_of_seconds(text: str) -> None:
    args = run_parser().parse_args(["--nnodes", "1", "--rdzv-conf", f"join_timeout={text}", __file__])
    check_options(args, "softgpu")
    config, _, _ = torchrun.config_from_args(args)
    with pytest.raises(ValueError, match=f"--rdzv-conf join_timeout={text}: it is a number of seconds"):
        check_config(args, config)


def test_ranks_of_faults_are_known_where_hosts_are_alike() -> None:
    """Else a host with two ranks of eight on three hosts refused what another's rank was to do."""
    several = ["--nnodes", "3", "--node-rank", "1", "--master-addr", "a", "--nproc-per-node", "2"]
    args = run_parser().parse_args([*several, "--fault", "rank=6 step=1 kind=kill", __file__])
    config, _, _ = torchrun.config_from_args(args)
    check_config(args, config)
    with pytest.raises(ValueError, match="the ranks are 0 to 5"):
        check_config(args, config, are_alike=True)


def test_what_is_not_given_is_read_by_nobody() -> None:
    """Argparse reads a default that is a text as if it was given: "" was a folder, the working one."""
    parser = run_parser()
    args = parser.parse_args(["train.py"])
    assert args.memory_spill is None
    for action in parser._actions:
        if action.default is not argparse.SUPPRESS and hasattr(args, action.dest) and action.option_strings:
            assert getattr(args, action.dest) == parser.get_default(action.dest), action.dest
