"""Who reads whose output: chains, branches, shortcuts, ties, and models that cannot be traced."""

import pytest
import torch
from torch import nn

from testbed.base.trace import Trace, TraceTensor
from testbed.prediction.cross_iteration import forward_order
from testbed.profiling.dag import consumers_of
from testbed.profiling.overhead import Step
from testbed.profiling.survey import survey_step
from testbed.workloads.load import load_workload


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def dag_of(model, *arguments):
    names = [name for name, _ in model.named_parameters()]
    return names, consumers_of(model, arguments, {}, names)


def readers(names, dag, name):
    return {names[i] for i in dag.consumers[names.index(name)]}


def layers_read_by(names, dag, name):
    return {reader.rpartition(".")[0] for reader in readers(names, dag, name)}


def workload_dag(spec, batch_size=2):
    workload = load_workload(spec, seed=1)
    batch = workload.train.batch(range(batch_size))
    step = Step(lambda: workload.loss(workload.model, batch))
    survey = survey_step(workload.model, step)
    arguments, keywords = survey.arguments
    names = list(survey.names)
    dag = consumers_of(workload.model, arguments, keywords, names)
    tensor = {"num_elements": 1, "forward_s": 1.0, "backward_s": 1.0}
    trace = Trace(
        name=spec,
        device="cpu",
        batch_size=batch_size,
        tensors=tuple(TraceTensor(name=n, **tensor) for n in names),
        consumers=dag.consumers,
    )
    assert forward_order(trace) == list(range(len(names)))  # layers ran in an order of the DAG
    return names, dag


def test_a_chain_is_a_chain():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    _, dag = dag_of(model, torch.ones(1, 4))
    assert dag.source == "torch.fx"
    assert dag.consumers == ((2, 3), (2, 3), (4,), (4,), ())


def test_shortcuts_of_a_residual_network():
    names, dag = workload_dag("resnet20")
    assert dag.source == "torch.fx"
    # The first layer's output goes into the first block and around it, into the second one.
    assert layers_read_by(names, dag, "features.0.1.weight") >= {
        "features.1.path.0.0",
        "features.2.path.0.0",
    }
    assert layers_read_by(names, dag, "features.0.0.weight") == {"features.0.1"}


def test_branches_of_inception():
    names, dag = workload_dag("inception-v4:image_size=75")
    counts = [len({names[i].rpartition(".")[0] for i in c}) for c in dag.consumers]
    # A block of several branches reads each branch of the block before it.
    assert max(counts) >= 4
    assert sum(count > 1 for count in counts) > 50


def test_every_layer_of_a_dense_block_reads_all_before_it():
    names, dag = workload_dag("densenet201:image_size=32")
    counts = [len({names[i].rpartition(".")[0] for i in c}) for c in dag.consumers]
    # 48 layers in the third block and the transition behind them: the block's input is read by all.
    assert max(counts) == 49


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)))


def test_a_tied_weight_makes_no_cycle():
    names, dag = dag_of(Tied(), torch.tensor([1, 2]))
    assert names == ["embedding.weight", "middle.weight", "middle.bias"]
    assert dag.consumers == ((1, 2), (), ())


class Branching(nn.Module):
    """Control flow over shapes of values: torch.fx gives up, torch.export does not."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.join = nn.Linear(8, 2)

    def forward(self, x):
        if x.shape[0] > 1:
            x = x * 2
        return self.join(torch.cat([self.left(x), torch.relu(self.right(x))], dim=1))


def test_export_takes_over_where_symbolic_tracing_fails():
    names, dag = dag_of(Branching(), torch.ones(3, 4))
    assert dag.source == "torch.export"
    assert "torch.fx: TraceError" in dag.reason
    assert readers(names, dag, "left.weight") == {"join.weight", "join.bias"}
    assert readers(names, dag, "right.bias") == {"join.weight", "join.bias"}
    assert readers(names, dag, "join.weight") == set()


class Data(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if x.sum().item() > 0 else x


def test_a_model_that_cannot_be_traced_is_a_chain_with_the_reason():
    _, dag = dag_of(Data(), torch.ones(1, 4))
    assert dag.consumers is None
    assert dag.source == "chain"
    assert "torch.fx: " in dag.reason
    assert "torch.export: " in dag.reason


@pytest.mark.parametrize("spec", ["gpt2", "bert-base"])
def test_language_models_are_traced(spec):
    pytest.importorskip("transformers")
    small = "num_layers=2,hidden_size=16,num_heads=2,vocabulary_size=200,sequence_length=8"
    names, dag = workload_dag(f"{spec}:{small}")
    assert dag.source in ("torch.fx", "torch.export")
    assert sum(bool(c) for c in dag.consumers) > len(names) / 2
