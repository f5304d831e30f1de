"""How wrong is a result: errors against fp64, and a tolerance that is computed, not chosen.

The measuring stick is the reference in fp64 on the same inputs. The budget is what a plain low-precision computation of
the same formula is off by and the rounding that no fp32 computation escapes, doubled:

    tolerance = 2 * (eager error + rounding band)

The band has two parts. The result is rounded to its dtype: eps / 2 * |out|. And a score is rounded before exp: an error
of eps(fp32) * |score| in it is one of the same size, relative, in its weight. The scores that weigh anything lie near
lse, so that is eps(fp32) * |lse| * |v|.
"""

from dataclasses import dataclass

import torch

from pkv.arguments import check_arrays, resolve_scale
from pkv.cache.paged import PagedKVCache
from pkv.stages.s0_reference import attend_row


@dataclass(frozen=True)
class Accuracy:
    """Largest absolute errors of a result against fp64, and the largest allowed."""

    max_err: float
    tolerance: float
    max_err_lse: float
    tolerance_lse: float

    @property
    def ok(self) -> bool:
        """Within tolerance; a NaN is not."""
        return self.max_err <= self.tolerance and self.max_err_lse <= self.tolerance_lse


class Yardstick:
    """The fp64 result of one batch, to measure any number of results against.

    q [n_rows, n_q_heads, head_dim], cache a PagedKVCache in the dtype under test; scale, window, soft_cap as for
    pkv.run.
    """

    def __init__(
        self, q: torch.Tensor, cache: PagedKVCache, scale: float | None = None, *, window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:  # fmt: skip
        check_arrays(q, cache, None)
        scale = resolve_scale(scale, q.shape[-1])
        self.out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        self.lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
        eager_err = eager_err_lse = score_band = 0.0
        eps, eps32 = torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps
        for row in cache.active_rows:
            k, v = cache.gather(row, window)
            if not len(k):
                continue
            # one row at a time: an fp64 copy of a whole cache would not fit
            self.out[row], self.lse[row] = attend_row(q[row].double(), k.double(), v.double(), scale, soft_cap)
            eager_out, eager_lse = _eager_row(q[row], k, v, scale, soft_cap)
            eager_err = max(eager_err, _largest(eager_out.double() - self.out[row]))
            eager_err_lse = max(eager_err_lse, _largest(eager_lse.double() - self.lse[row]))
            score_band = max(score_band, eps32 * _largest(self.lse[row]) * _largest(v))
        dtype_band = eps / 2 * max(_largest(self.out), torch.finfo(q.dtype).tiny)
        self.tolerance = 2 * (eager_err + dtype_band + score_band)
        # lse is kept in fp32 whatever q's dtype; exp2 and log2 of the hardware are good to 2 units in the last place
        finite = self.lse[torch.isfinite(self.lse)]
        self.tolerance_lse = 2 * (eager_err_lse + 4 * eps32 * max(_largest(finite), 1.0))

    def measure(self, out: torch.Tensor, lse: torch.Tensor, rounds_weights: bool = False) -> Accuracy:
        """Errors of one result; NaN anywhere, or an infinity in the wrong place, makes them NaN or inf.

        rounds_weights: the engine rounds weights to q's dtype before it sums them, as FlashInfer's tensor-core kernel
        does. Their sum is then off by up to eps / 2, relative, and lse by as much; out is not, as both its sums agree.
        """
        if out.shape != self.out.shape or lse.shape != self.lse.shape:
            shapes = f"{list(self.out.shape)} and {list(self.lse.shape)}"
            raise ValueError(f"out {list(out.shape)} and lse {list(lse.shape)} must be {shapes}")
        same_infinity = (lse == self.lse.to(lse.dtype)) & torch.isinf(self.lse)
        lse_error = torch.where(same_infinity, 0.0, lse.double() - self.lse)
        tolerance_lse = self.tolerance_lse + rounds_weights * torch.finfo(out.dtype).eps / 2
        return Accuracy(_largest(out.double() - self.out), self.tolerance, _largest(lse_error), tolerance_lse)


def _eager_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, soft_cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same formula the plain way: operands and weights in q's dtype, sums in fp32, as a tensor core does."""
    q, k, v = q.detach(), k.detach(), v.detach()
    group = q.shape[0] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    with torch.autocast(q.device.type, enabled=False):
        scores = scale * torch.einsum("hd,thd->ht", q.float(), keys)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = torch.softmax(scores, dim=-1).to(q.dtype).float()
        return torch.einsum("ht,thd->hd", weights, values).to(q.dtype), torch.logsumexp(scores, dim=-1)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
