"""Explain every chart, under the chart: content, formula, and caveats.

A displayed formula is between two lines of only `$$`, because Streamlit reads everything after text on that line as a
formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PAPER = "https://arxiv.org/abs/2605.13030"
SOURCE = (
    f"*Prop.*, *Eq.* and *Algorithm* are those of the [paper]({PAPER}); `docs/theory.md` says how each is measured."
)
"""End of every explanation that cites propositions or equations."""

DRIFT = r"""
**What this shows.** For every layer $\ell$ and sample the difference between the model's feature and the task
expert's, $e^\ell = h^\ell_\text{model} - h^\ell_\text{expert}$, split into two parts:

- *local mismatch* $m^\ell = f^\ell_\text{model}(h^{\ell-1}_\text{expert}) - h^\ell_\text{expert}$: the error that this
  layer makes even on the expert's own input;
- *propagation* $p^\ell = h^\ell_\text{model} - f^\ell_\text{model}(h^{\ell-1}_\text{expert})$: the effect of earlier
  errors on this layer's output.

**Formula.** $e = m + p$ exactly, as vectors (Prop. 1). Bars and line are means over samples of the norms.

**When it misleads.** Norms do not add: $\|e\| \le \|m\| + \|p\|$, so the line can be below either bar if the
parts cancel (negative cosine of $m$ and $p$, in the table). The norm runs over all
tokens, but only one reaches the head: CLIP's class token, a language model's token before the answer. A layer of an
encoder-decoder's decoder holds its own tokens and the encoder's normed output, both of which later layers see, under
one norm: it is not the decoder's drift alone. Layers differ in scale: compare them in relative units. A small drift is
not yet a right answer; see Accuracy.
"""

DRIFT_TASKS = r"""
**What this shows.** The drift of the chosen layer, task by task, in the parts and units of the chart above.

**When it misleads.** Every task is compared with its own expert, so tasks whose expert moved far from the base show
large drift even if the answer is still right.
"""

CALIBRATE = r"""
**What this shows.** The drift $\|e\|$ of the merged and of the calibrated model, per layer, mean over samples and
tasks, on **validation** samples, which calibration never sees (on calibration samples if a suite has none). Every
calibration is the exact closed form in forward order, and replaces the preview above:

$$
W = \Big(\sum_i \omega_i W_i C_i + \lambda\, W_\text{anchor}\Big)
\Big(\sum_i \omega_i G_i + (\lambda+\varepsilon) I\Big)^{-1}
$$

$$
W_\text{anchor} = \rho\, W_\text{merged} + (1-\rho)\, W_\text{base}
$$

with $C_i = \alpha X_i^\text{exp} {X_i}^\top + (1-\alpha)\, G_i$ and $G_i$ the Gram matrix of the deployed inputs.

- $\lambda$: how strongly the anchor holds; large values return to the anchor, small ones trust the samples.
- $\rho$: 1 anchors at the merged model, above 1 beyond it, 0 at the base.
- $\alpha$: share of the expert's own inputs in the targets.
- Recipe: *paper* is the method as published. *refined* is featcal's own: the pieces of a block are solved one after
  the other, each on the final outputs of those before it, and the maps that write into the residual stream are asked
  to close a share $\beta$ of its gap to the expert. *informed* is refined, and adds to every map's objective
  $\mu \sum_i \|(W - W_0 - \rho\tau_i) K_i^{1/2}\|^2$ with the task vector $\tau_i = W_i - W_0$ and
  $K_i \propto \tau_i^\top\tau_i$: information in the experts' weights on their training inputs.

**When it misleads.** Options that are chosen on few validation samples fit those samples; the score on the test
split (page Accuracy) is for the final choice. With few calibration samples and a small $\lambda$ drift can grow in
directions that the samples do not contain.
"""

FEATURES = r"""
**What this shows.** Features of the expert and of the models shown, on the same samples of one task, all divided by
their norm, in **one** map that is fitted on all their clouds together, so their places can be compared. Arrows lead
from the first model to the second. Click a point, or draw around some, to see their samples.

**Layers.** After a block a feature is CLIP's state of the class token, or a language model's mean over the stage's
own tokens without padding. One map holds **all** of these layers: a cloud moves on it as it goes through depth,
and dotted lines lead along its mean. The head's features have a space, and so a map, of their own.

**Formula.** UMAP, 15 neighbours, cosine distance, seed 42; PCA until UMAP has run. *Trustworthiness* (0-1) is
the share of map neighbours, 10 per point, that are neighbours in the full space too, with a penalty by rank; for a
map of all layers it is that of the layer shown. A map holds at most 20,000 points; of more samples it shows a part.

**When it misleads.** Distances between clusters, cluster sizes and axis directions of a UMAP mean nothing. The
histograms beside it are the truth: cosine and distance to the expert in the full feature space. The small maps are
one each: places on two of them cannot be compared.
"""

FEATURES_OF_TEXT = (
    FEATURES
    + r"""
**Texts.** The head's feature is the state that decides the first token of the answer, after the final norm. The mean
over a decoder's tokens includes tokens of the right answer, which it is given.
"""
)

COSINES = r"""
**What this shows.** (a) Mean cosine of final features to the task's expert. (b) This cosine, one point per sample
of the chosen task: above the diagonal calibration brought it closer. (c) Per task, how much cosine and how much
score the second model gained over the first. (d) In parameter space: cosine of
$\theta_\text{model} - \theta_\text{base}$ to $\theta_\text{expert} - \theta_\text{base}$.

**When it misleads.** Cosines ignore feature length, as a zero-shot head does; a language model's head does not.
In (c) the score is a count over few samples: one sample is one step. (d) need not grow: features can come closer to
the expert's while the weights do not.
"""

ACCURACY = r"""
**What this shows.** Top-1 accuracy on the whole **test** split: image features against class prompts through the
base's own text tower. *gap closed* $= \dfrac{\text{calibrated} - \text{merged}}{\text{expert} - \text{merged}}$.

**When it misleads.** Choose options on validation samples (page Calibrate): a test split that is scored at every
slider position becomes a validation split. The gap closed is unstable if expert and merged model are close, and left
out if the expert is not better.
"""

ACCURACY_OF_TEXT = r"""
**What this shows.** Every model answers the whole **test** split: greedy generation by the library's own `generate`,
compared with the right answer as a whole string (exact match). *gap closed*
$= \dfrac{\text{calibrated} - \text{merged}}{\text{expert} - \text{merged}}$.

**When it misleads.** The page Calibrate scores whole answers too, of fewer samples; if these take long it shows
the first token of the answer, which can be right although the answer is wrong. Exact match counts a right answer in
other words as wrong. Choose options on validation samples; the gap closed is unstable if expert and merged model are
close, and left out if the expert is not better.
"""

ACCURACY_OF_HEADS = r"""
**What this shows.** How good every model's answers on the whole **test** split are, after the expert's own head for
each task: accuracy for classes, Spearman's rank correlation for the similarity of two texts. *gap closed*
$= \dfrac{\text{calibrated} - \text{merged}}{\text{expert} - \text{merged}}$.

**When it misleads.** Choose options on validation samples (page Calibrate): a test split that is scored at every
slider position becomes a validation split. The gap closed is unstable if expert and merged model are close, and left
out if the expert is not better.
"""

DIFFERENCES = r"""
**What this shows.** How much better the second model scores than the first, per task and on average over tasks, with
the interval in which the difference lies for 95 of 100 draws of such samples. Grey and open: within noise.

**Formula.** The samples are drawn again with replacement, within each task, both models on the same draw; the interval
runs from the 2.5th to the 97.5th percentile of the differences. McNemar: of $k$ samples whose answer changed, $f$ were
fixed; $p$ is the chance that $k$ throws of a fair coin are as uneven (for the average: over all tasks together).
*Within noise*: the interval holds 0, or $p > 0.05$, since few changed answers make the interval alone too sure.

**When it misleads.** The interval is about other samples, not about other calibration samples: another seed gives
another model. Of twenty tasks without any difference one looks like one. Models that were chosen on these very samples
look better than they are. A rank correlation has only the interval: its answers are not right or wrong one by one.
"""

ATTRIBUTION = r"""
**What this shows.** The final drift, attributed to the layers whose local mismatch caused it: each bar starts where
the last one ended and add up to the final drift, relative to the norm of the expert's final feature. Percentages
are shares; a negative one (green) compensates for the others. The ticks are the cumulative share under the
alternative attribution.

**Formula.** $e^L = \sum_\ell c_\ell$ with $c_\ell = A_L \cdots A_{\ell+1}\, m^\ell$ and $A_k$ the Jacobian of layer
$k$ averaged between the expert's and the model's input (Prop. 2); share $= \langle c_\ell, e^L\rangle / \|e^L\|^2$.
Ticks: $e^L = \sum_\ell (u_{\ell-1} - u_\ell)$, $u_\ell$ the model's remaining layers on the expert's state after
layer $\ell$.

**When it misleads.** Two allocations of one total need not agree, and neither is *the* answer if they differ.
Large contributions can cancel: a small share is not a small error. Repairing a layer changes what later layers
receive, so shares are not the gain of repairing it.
"""

GROWTH = r"""
**What this shows.** Left: $\gamma$, how much a block stretches the drift that comes in, and $\eta$, how much new
mismatch it adds, both relative to the incoming drift. Right: whether the block's residual branch answers incoming
drift by amplifying it (above 0) or compensating for it (below 0).

**Formula.** $\gamma = \|p\|/\|e_\text{before}\| - 1$, $\eta = \|m\|/\|e_\text{before}\|$, $\|e\| \ge
(1+\gamma-\eta)\|e_\text{before}\|$ (Prop. 5); $r = p - e_\text{before}$ (Prop. 4). Hover for the share of samples
for which growth is *certified*: $\gamma > 0$ and $\eta < \gamma$.

**When it misleads.** No certificate does not mean no growth: drift mostly grows by new mismatch, which is not
certified.
"""

OUTPUTS = r"""
**What this shows.** Left: the distance between the scores of expert and model, and its bound from the final drift.
Right: for how many samples the model decides as the expert (full symbols), and for how many the margin *proves* it
(open symbols); hover for the accuracy.

**Formula.** $\|\Delta z\| \le B\,\|e^L\|$, $B = s\,\sigma_\text{max}(T)/d_\text{min}$ with $d_\text{min}$ the
distance of the segment between both features from the origin (Prop. 3). Certified: $\|\Delta z\|_\infty < \mu/2$,
$\mu$ the expert's margin (Eq. 44).

**When it misleads.** The certificate is sufficient, not necessary: most decisions that agree are not certified. The
expert is not always right.
"""

OUTPUTS_OF_TEXT = r"""
**What this shows.** Scores of the first token of the answer, over the whole vocabulary. Left: the distance between
those of expert and model, and its bound from the final drift. Right: for how many samples the model chooses the
expert's token (full symbols), and for how many the margin *proves* it (open symbols); hover for the share of right
tokens.

**Formula.** $\|\Delta z\| \le B\,\|e^L\| + \delta$, $B = \sigma_\text{max}$ of the model's own head and $\delta$ the
difference of the two heads on the expert's feature (Prop. 3). Certified: $\|\Delta z\|_\infty < \mu/2$, $\mu$ the
expert's margin (Eq. 44).

**When it misleads.** The certificate is sufficient, not necessary: most decisions that agree are not certified. Later
tokens of the answer do not count. The expert is not always right.
"""

OUTPUTS_OF_HEADS = r"""
**What this shows.** Scores of the classes after the expert's own head. Left: the distance between those of expert and
model, and its bound from the final drift. Right: for how many samples the model decides as the expert
(full symbols), and for how many the margin *proves* it (open symbols); hover for the accuracy.

**Formula.** $\|\Delta z\| \le B\,\|e^L\|$, $B = \sigma_\text{max}$ of the head, of both maps if there are two
(Prop. 3). Certified: $\|\Delta z\|_\infty < \mu/2$, $\mu$ the expert's margin (Eq. 44).

**When it misleads.** The certificate is sufficient, not necessary: most decisions that agree are not certified. The
expert is not always right.
"""


@dataclass(frozen=True)
class ScoreTexts:
    """Texts about scores and decisions, for models with the same kind of scores."""

    accuracy: str
    outputs: str


BY_SCORES: Mapping[str, ScoreTexts] = {
    "prompts": ScoreTexts(ACCURACY, OUTPUTS),
    "vocabulary": ScoreTexts(ACCURACY_OF_TEXT, OUTPUTS_OF_TEXT),
    "own": ScoreTexts(ACCURACY_OF_HEADS, OUTPUTS_OF_HEADS),
}
"""Sentences on scores by the kind of a model's scores (`Adapter.scores_with`)."""

SOURCES = r"""
**What this shows.** How much worse the calibration objective of each block is if its linear maps are fitted on other
features than the finished model exposes: one block *stale*, the uncalibrated *merged* model's, the *expert*'s.
*snapshot*: all modules of a block are fitted on one snapshot, while the finished block exposes the outputs of its own
new modules.

**Formula.** $J_\text{dep}(W_\text{src}) - J_\text{dep}(W_\text{dep}) \ge 0$ (Prop. 8), over
$J_\text{dep}(W_\text{dep})$, summed over the block's linear maps. The prefix-calibrated source of Algorithm 1 has
none.

**When it misleads.** It is the local objective on the calibration samples, not accuracy.
"""

LEADERBOARD = r"""
**What this shows.** Every method at its defaults, on the same samples. *average* is the unweighted mean over tasks on
the test split, *interval* half the width of its 95 % interval by Student's t over calibration seeds (wide for three
seeds), *normalised* the mean over tasks of the score as a share of the expert's. *drift* is the relative drift of the
final features, *cosine* theirs to the expert's. *CPU s* and *MB* are the processor time to make the model and the
growth of the process meanwhile; the experts' own passes count if a method needs them.

**What a method needs.** *samples*: unlabelled calibration samples. *labels*: the answers of language models' samples,
read as tokens and compared with nothing. *test data*: samples of the split that is scored. *training*: steps of
gradient descent. *modules*: modules or whole models per task. *task*: the task of every sample, when the model is used.

**When it misleads.** The authors of the methods tuned their defaults on other models, and the refined recipe was tuned
on the validation split of clip-mini. A method that needs the task of every sample answers an easier question than one
model for all. Seconds of small models are mostly overhead. The interval covers other calibration samples, not other
models or tasks.
"""

SWEEP = r"""
**What this shows.** Every run of the suite that was measured on these samples, and hollow every method of the table
below: the mean score over tasks upwards, over the score of the worst task, the cost, the final drift or an option. Up
is better, and over the worst task to the right too. Thin rings mark the Pareto front of mean and worst task: no run is
at least as good in both and better in one (experts, one model per task, take no part). Beside the calibrated runs are
models that need no data: Task Arithmetic at other scales, the mean of the experts, and *anchor only*, the model that
calibration is pulled to, $\rho\,\theta_\text{merged} + (1-\rho)\,\theta_\text{base}$ (Eq. 11).

**Formula.** Mean and minimum over tasks of the score on the same samples; the point of a run is the exact result of a
single calibration with its options. Cost is the processor seconds to make the model, if they are known.

**When it misleads.** With 64 samples a task's score moves by 1.6 points with every sample, and the best of many runs
looks better than it is: choose here, and look at the test split once. The methods of the table are scored on that test
split, so do not choose options by them. A later run reuses the experts' passes and costs less than the first one. The
worst task may be the one that is hardest for its own expert too.
"""

PREVIEW = r"""
**What this shows.** The first calibrated block, solved again with the current options; the exact run of all blocks
follows and replaces it.

**Formula.** Eq. (17) from kept sums: the targets $\alpha X_i^\text{exp} {X_i}^\top + (1-\alpha) G_i$ are affine in
$\alpha$ (and in $\beta$, if the recipe has one), so sums at the ends give them for every value; $\lambda$, $\rho$
and $\mu$ enter the solve alone.

**When it misleads.** It is the exact result of this block; for recipes that go piece by piece, only of the first
pieces, since later pieces keep the result of the last exact run. Nothing after the block is computed.
"""

WHERE_IT_HELPS = r"""
**What this shows.** The change by calibration for every task and layer: blue is less than before, orange is more.

**Formula.** *Drift*: change of $\|e\| / \|h_\text{expert}\|$, means over samples. *Booked to the layer*: change of the
layer's share of the final drift (Prop. 2) times the final relative drift, so that a row sums to the change of the
final drift.

**When it misleads.** A layer whose drift falls need not be where the repair happened: less drift comes in from the
layers before it. The share of a layer is its own; yet large contributions can cancel (see the Drift page).
"""

ANCHOR_ONLY = r"""
**What this shows.** These numbers for the anchor alone: base + ρ (merged − base), which needs no samples. For a merge
by Task Arithmetic with scale $s$, it is Task Arithmetic with scale $\rho s$. The gain of calibration is its
difference to this row, not to the merged model's.

**Formula.** Eq. (11), in every tensor; calibration pulls to it with strength $\lambda$.

**When it misleads.** The anchor moves embeddings and final norm as well, which calibration leaves as merged.
"""

CONDITIONING = r"""
**What this shows.** Every linear system of the calibration. The smallest eigenvalue stays near $\lambda$ if the
samples miss a direction, in which the solution is then the anchor; a large ratio magnifies rounding and noise.

**Formula.** Eigenvalues of $\sum_i \omega_i G_i + (\lambda + \varepsilon) I$ (Eq. 17). *Effective rank*
$= \sum_j \mu_j / (\mu_j + \lambda + \varepsilon)$, $\mu_j$ the eigenvalues without $\lambda$: how many directions
the samples decide. *Tokens* are the counted tokens of all tasks; fewer than the width cannot fill it.

**When it misleads.** Many tokens of few pictures are alike: the effective rank says more than their number. A low rank
is not bad if the model uses no other directions.
"""

SPREAD = r"""
**What this shows.** The scores of three calibrations with the same options on other samples: the seed selects
them. Symbols are means, lines reach from the lowest to the highest.

**When it misleads.** Three seeds can show that a difference may be chance, not that there is none. If a task has no
more samples than requested, every seed draws the same ones in another order.
"""

MAPS = r"""
**What this shows.** Left: for every linear map inside the chosen block the distance of the model's map from the
expert's on the inputs of the **expert's** map,
$\|(W_\text{model} - W_\text{expert})\,x + b_\text{model} - b_\text{expert}\|$, mean over samples. Right: for a
calibrated model the share of each map in the change by calibration,
$\|\Delta W\|^2 + \|\Delta b\|^2$ over their sum; the shares of a block sum to 1.

**When it misleads.** These mismatches are no parts of the block's: they are before its nonlinearities and do
not add up to it. A map whose output is small in the residual stream may differ a lot without harm. A large change of
weights may change little on real inputs. Norms, and the maps of a mixture's experts, are left out.
"""

DEPTH = r"""
**What this shows.** After every block the decision that the model would make if it ended there: the block's state
through the model's own last norm, projection and head (CLIP: scores of the classes; language models: the first token of
the answer). The chart above: the share of samples whose decision is already the **expert's final one**; at the last
block it is the agreement of the tab *Decisions*. Below, one sample: the first answer after every block, darker the
more probable; a line above a block marks where the decision becomes final. Point at a cell for its next answers.

**When it misleads.** A head is made for the last layer and never learned to read another. Its answers after early
blocks show where a decision turns, not what a block "thinks": the right answer may be there in a form that the head
does not see, and probabilities in between mean little. An encoder-decoder is read in its decoder alone.
"""

TOKENS = r"""
**What this shows.** One sample after the chosen layer, token by token: how far the state of each is from the
expert's, $\|e_t\|$. Relative units divide by the norm of the expert's state of the **same** token, so that a token with
a large state does not outshine the rest. All models have one scale of colours. Point at a token for its share of
the layer's squared drift.

**Formula.** $\|e\|^2 = \sum_t \|e_t\|^2$: the root of the sum of squares of absolute drifts is exactly the drift that
the chart above takes the mean of, with padding left out. A decoder of an encoder-decoder sees its own tokens (the
start token, then the answer) and the encoder's output, so both are shown.

**When it misleads.** Position is not content: attention mixes tokens in every block, so drift at a patch may have come
from elsewhere. After the last block the head reads a single token (CLIP: the class token; an answer's first token is
decided at the last token of the prompt, or at the decoder's start token), and the states of other tokens no longer have
an effect. A few tokens, such as a text's first, have states of huge norm in many language models, and dominate absolute
drift. After the head there are no tokens.
"""
