"""Trainings with CUDA graphs, with their gradients in one and the optimizer's step outside of it: they go on.

With the step inside no save is made, so that none is wrong. In transparent mode all go on.
"""

import re

import pytest
from dying_training import HEAD, RUN, assert_goes_on
from launcher import Launcher

PROGRAM = """
net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).cuda()
optimizer = torch.optim.Adam(net.parameters(), 0.1, capturable=True)
x, y = torch.randn(6, 8).cuda(), torch.randint(0, 4, (6,)).cuda()
init = lambda: jitckpt.init(model=net, optimizer=optimizer)


def gradients():
    optimizer.zero_grad(set_to_none=True)
    loss = cross_entropy(net(x), y)
    loss.backward()
    for one in net.parameters():
        dist.all_reduce(one.grad)
    return loss


def whole_step():
    gradients()
    optimizer.step()


def warm_up(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def train(job, step, steps=8):
    for number in job.steps(steps):
        x.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(number + 10 * rank)))
        step(number)
        at("stepped", number)
    end(net, [one.tolist() for one in net.buffers()])

"""
CAPTURED_BEHIND_INIT = """
warm_up(gradients)
job = init()
graph = captured(gradients)


def step(number):
    graph.replay()
    optimizer.step()


train(job, step)
"""
CAPTURED_BEFORE_INIT = """
warm_up(gradients)
graph = captured(gradients)
train(init(), lambda number: (graph.replay(), optimizer.step()))
"""
GRAPHED_CALLABLES = """
job = init()
torch.cuda.make_graphed_callables(net, (torch.zeros(6, 8, device="cuda"),))
train(job, lambda number: whole_step())
"""
STEPS_IN_A_GRAPH = """
warm_up(whole_step)
graph = captured(whole_step)
job = init()
train(job, lambda number: whole_step() if number % 4 == 0 else graph.replay())
"""
STEPS_BEHIND_INIT = """
job = init()
graph = captured(whole_step)
train(job, lambda number: graph.replay())
"""


@pytest.mark.parametrize("way", [CAPTURED_BEHIND_INIT, CAPTURED_BEFORE_INIT, GRAPHED_CALLABLES])
def test_gradients_in_a_graph_go_on(launcher: Launcher, way: str) -> None:
    assert_goes_on(launcher, PROGRAM + way, "1 stepped 4", unsaid="No state of this rank is saved")


@pytest.mark.parametrize("way", [STEPS_IN_A_GRAPH, STEPS_BEHIND_INIT])
def test_steps_in_a_graph_are_never_saved(launcher: Launcher, way: str) -> None:
    script = launcher.script(HEAD + PROGRAM + way)
    undisturbed = launcher.run(*RUN, "--checkpoint-dir", "undisturbed", script)
    result = launcher.run(*RUN, "--checkpoint-dir", "disturbed", script, "1", "stepped", "5")
    assert undisturbed.status == result.status == 0, result.err
    assert sorted(undisturbed.out.splitlines()) == sorted(result.out.splitlines())
    assert "the script replays a CUDA graph in which an optimizer makes its step" in result.err
    assert "No whole state could be saved" in result.err


TRANSPARENT = """
import ctypes
proxy = ctypes.CDLL(None)
steps_in_graph, kills = sys.argv[1] == "whole", sys.argv[2] == "kills"
warm_up(whole_step)
graph = captured(whole_step if steps_in_graph else gradients)
for number in range(14):
    x.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(number + 10 * rank)))
    graph.replay()
    if kills and rank == 1 and number == 10:
        os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)
    if not steps_in_graph:
        optimizer.step()
end(net, [one.tolist() for one in net.buffers()])
"""


@pytest.mark.parametrize("way", ["whole", "gradients"])
def test_a_server_that_dies_is_replaced_in_transparent_mode(launcher: Launcher, way: str) -> None:
    script = launcher.script(HEAD + PROGRAM + TRANSPARENT)
    run = [*RUN, "--mode", "transparent", "--checkpoint-dir"]
    undisturbed = launcher.run(*run, "undisturbed", script, way, "")
    result = launcher.run(*run, "disturbed", script, way, "kills")
    assert undisturbed.status == result.status == 0, result.err
    assert sorted(undisturbed.out.splitlines()) == sorted(result.out.splitlines())
    assert re.search("all ranks went (back to|on from) the state after step", result.err), result.err
    in_graph = "a CUDA graph makes the step of optimizer 0 (Adam)" in result.err
    assert in_graph == (way == "whole")


def test_no_save_is_restored_behind_the_capture_of_a_step(launcher: Launcher) -> None:
    eager = PROGRAM + "job = init()\ntrain(job, lambda number: whole_step())\n"
    saving = eager.replace("optimizer=optimizer", "optimizer=optimizer, save_every=1")
    script = launcher.script(HEAD + saving)
    assert launcher.run(*RUN, "--checkpoint-dir", "saves", script).status == 0
    script = launcher.script(HEAD + PROGRAM + STEPS_BEHIND_INIT)
    result = launcher.run(*RUN, "--checkpoint-dir", "saves", script)
    assert result.status != 0
    assert "Call job.restore() before it" in result.err
