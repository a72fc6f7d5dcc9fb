"""What `jitckpt run` may be called with."""

import pytest

from jitckpt.cli.run_checks import check_modes, check_options
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


def test_where_no_first_host_is_given_there_is_none() -> None:
    args = run_parser().parse_args(["--nnodes", "2", "--node-rank", "1", __file__])
    with pytest.raises(ValueError, match=r"--nnodes 2 needs --rdzv-backend c10d .* or --master-addr HOST"):
        check_options(args, "softgpu")
    args = run_parser().parse_args([__file__])
    check_options(args, "softgpu")
    assert args.master_addr == "127.0.0.1"


def test_a_number_of_copies_is_a_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'-1' is no whole number from 0 on" in refused(capsys, "--snapshot-copies", "-1")
