"""Code from the documentation of the reference systems, verbatim.

Cerebras' "Efficient weight initialization" and "Limitations of PyTorch on Cerebras". `...` marks their omissions.
"""

# -- Efficient weight initialization ----------------------------------------------------------------------------------

ON_THE_DEVICE = """
backend = cstorch.backend("CSX")

with backend.device:
    model = Model()

# compile the model the same way as before
compiled_model = cstorch.compile(model, backend)
"""

LAZILY = """
backend = cstorch.backend("CSX")
backend.device.config.lazy_initialization = True

with backend.device:
    model = Model()
"""

TWICE = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()

        self.w1 = torch.nn.Parameter(torch.empty(2, 2))
        self.w2 = torch.nn.Parameter(torch.empty(2, 2))

        self.reset_parameters()

    def reset_parameters(self):
        self.w1.data.uniform_(-1, 1)
        self.w2.data.normal_()

backend = cstorch.backend("CSX")
backend.device.config.lazy_initialization = True

with backend.device:
    model = Model()

def init_weights(model):
    torch.nn.init.kaiming_uniform_(model.w1)
    torch.nn.init.kaiming_normal_(model.w2)

model.apply(init_weights)
"""

THE_ASSERT_THAT_WILL_FAIL = """
cpu_model = Model()
cpu_model.reset_parameters()

with backend.device:
    model = Model()
    model.reset_parameters()

# This assert will fail!
assert torch.allclose(cpu_model.w1, model.w1.to("cpu"))
"""

ALIAS = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(4, 2)

    def forward(self, x):
        return x @ self.fc1.weight.T + self.fc1.bias

backend = cstorch.backend("CSX")

with backend.device:
    model = Model()
"""

NO_ALIAS = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = torch.nn.Linear(4, 2)

    def forward(self, x):
        return F.linear(x, self.fc1.weight, self.fc1.bias)
"""

# -- Limitations of PyTorch on Cerebras -------------------------------------------------------------------------------
# Their functions end in `): -> torch.Tensor`, which is not valid Python: `as_python` corrects it.

COUNTER = """
def bad_function(input1: torch.Tensor, input2: torch.Tensor): -> torch.Tensor
   global step # regular python int. global is bad for other reasons, but ignore that
   step += 1
   if step < 10:
      return input1
   else:
      return input2
"""

WHERE = """
def better_function(input1: torch.Tensor, input2: torch.Tensor, step: torch.Tensor): -> torch.Tensor
   step += 1
   output = torch.where(step < 10, input1, input2)
   return output
"""

VALUE_READ = """
def bad_function(input1: torch.Tensor, input2: torch.Tensor): -> torch.Tensor
   if input1.max() < 0:
      raise ValueError("input1 must have positive elements!")
   return input1 + input2
"""

SCALAR = """
output = input.addcdiv(tensor1, tensor2, 3.14)
"""

SCALAR_FROM_OUTSIDE = """
pi = torch.tensor(3.14, dtype=torch.float16)
output = input.addcdiv(tensor1, tensor2, pi)
"""

TRACED_SCALAR = """
lrs = torch.where(step > 1000, step.float() * 0.0001, 0.0002)
output = input.addcdiv(tensor1, tensor2, lrs)
"""

OPTIMIZER = """
class CustomOptimizer(torch.optim.Optimizer):
    ...
    def step(self):
        ...
        for param_group in self.param_groups:
            for p in param_group["params"]:
                if len(self.state[p]) == 0:
                    state[p]["momentum"] = torch.zeros_like(p.grad)
                state[p]["momentum"].add_(p.grad * 0.001)
        ...
"""

EDITED_BETWEEN_RUNS = """
train_executor = cstorch.utils.data.DataExecutor(
    num_steps=1000, checkpoint_steps=100
)
for inputs, targets in train_executor:
    ...

model.fc1.weight.data.mul_(0.9)  # This is allowed

train_executor = cstorch.utils.data.DataExecutor(
    num_steps=1000, checkpoint_steps=0
)
for inputs, targets in train_executor:
    ...

model.fc1.weight.data.mul_(0.9)  # This is *not* allowed

validation_executor = cstorch.utils.data.DataExecutor(...)
for step, (inputs, targets) in enumerate(validation_executor):
    ...
"""


def as_python(sample: str) -> str:
    """Move the colon of a function's head to its end."""
    return sample.replace("): -> torch.Tensor", ") -> torch.Tensor:")
