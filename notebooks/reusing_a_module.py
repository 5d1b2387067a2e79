# %% [markdown]
# # Taking the attention module elsewhere
#
# `MultiHeadAttention` is a flax nnx module like any other. Here it is one layer of a small model that learns to copy
# the token three places back, with nothing else of this project.

# %%
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mha_kernels import CausalMask, attention_with_statistics
from mha_research import MultiHeadAttention, Rotary

SYMBOLS, LENGTH, BACK = 7, 13, 3


class Copier(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(SYMBOLS, 16, rngs=rngs)
        self.attention = MultiHeadAttention(16, num_heads=2, position=Rotary(), rngs=rngs)
        self.read = nnx.Linear(16, SYMBOLS, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.read(x + self.attention(x, mask=CausalMask()))


# %% [markdown]
# The module is split once; training works on the plain tree of its parameters under `jax.jit`.

# %%
graphdef, params = nnx.split(Copier(nnx.Rngs(0)), nnx.Param)
optimizer = optax.adam(1e-2)


@jax.jit
def step(params, state, key):
    tokens = jax.random.randint(key, (32, LENGTH), 0, SYMBOLS)

    def loss(params):
        logits = nnx.merge(graphdef, params)(tokens)[:, BACK:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, :-BACK]).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    change, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, change), state, value


state = optimizer.init(params)
for number in range(300):
    params, state, value = step(params, state, jax.random.key(number))
    if number % 100 == 99:
        print(f"step {number + 1}: {value:.2f} nats, {jnp.log(SYMBOLS):.2f} by guessing")

# %% [markdown]
# Where does a head look? The weights of the trained module, averaged over queries, by how far back the key is.

# %%
model = nnx.merge(graphdef, params)
tokens = jax.random.randint(jax.random.key(1000), (1, LENGTH), 0, SYMBOLS)
_, weights = model.attention(model.embed(tokens), mask=CausalMask(), return_weights=True)
for head in range(2):
    back = [float(jnp.diagonal(weights[0, head], -distance).mean()) for distance in range(6)]
    print(f"head {head}:", " ".join(f"{share:.2f}" for share in back))

# %% [markdown]
# The kernel alone takes plain arrays, and gives statistics of every head with the output.

# %%
query, key, value = jax.random.normal(jax.random.key(0), (3, 1, LENGTH, 2, 8))
output, statistics = attention_with_statistics(query, key, value, mask=CausalMask())
print(output.shape, statistics.entropy.shape)
