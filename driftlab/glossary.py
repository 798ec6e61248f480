"""The words of driftlab, a sentence or two each: for the page and, printed as Markdown, docs/glossary.md.

``python -m driftlab.glossary`` prints that file.
"""

from __future__ import annotations

# Term -> what it means, in plain text; `code` in backticks.
GLOSSARY = {
    "against": (
        "The arm that another arm is compared with. `candidate.float32` and `control.float32` are compared "
        "with `reference.float32`, and `reference.float32` with `reference.float64`."
    ),
    "arm": (
        "One network in training: a role (reference, candidate or control) in one dtype, written "
        "`candidate.float32`."
    ),
    "candidate": "The network after a rewrite.",
    "control": (
        "The reference with one weight moved by one ulp, trained like the others. It computes the same "
        "function, so what separates it from the reference is rounding and nothing else."
    ),
    "disagreement": (
        "The share of the test set on which two arms predict different classes. It is also called churn."
    ),
    "diverged": (
        "A training has diverged where its loss becomes NaN or inf, or where its final loss is more than "
        "twice its first. The final loss is the median over the last tenth of the rows."
    ),
    "drift": "How the weight distance of two arms grows over the steps of a training.",
    "evidence": (
        "What a probe or a curve answered: the number that was measured, its threshold, and the verdict that "
        "it supports, if any."
    ),
    "excess": (
        "A distance above what the controls allow: the pair of candidate and reference is more than HALFWAY "
        "times as far apart as any control has been so far. driftlab then compares both networks at that "
        "step, on the same weights and the same batch."
    ),
    "float64 pair": (
        "Candidate and reference, both trained in float64. Rounding is 2^29 times smaller there than in "
        "float32; a wrong function is as wrong as before."
    ),
    "fold": (
        "The map from the candidate's tensors back to the names and shapes of the reference, for example the "
        "two halves of a split convolution put together. Distances are taken after folding, in float64."
    ),
    "HALFWAY": (
        "2^14.5, about 23,170: the threshold between rounding and a wrong function. Rounding predicts that a "
        "difference shrinks by 2^-29 from float32 to float64, a wrong function that it does not shrink. "
        "HALFWAY is the middle of the two, in powers of two."
    ),
    "kink": (
        "A point at which the derivative of a function jumps: ReLU at 0, or two equal values in the window "
        "of a max-pool. A difference of one ulp on the two sides of a kink becomes a difference of ordinary "
        "size in the gradient."
    ),
    "local window": (
        "A window somewhere along a long run. Candidate and controls are put on the weights, buffers and "
        "optimizer state that the reference has at that step, and are followed for a few updates."
    ),
    "lockstep": (
        "All arms start from the same weights and see the same batch, with the same augmentation, at every "
        "step."
    ),
    "place": "Where a bug was found: module, pass (such as forward or input gradient) and step.",
    "probe": (
        "A short check that answers one question, mostly without training. Each probe is one file in "
        "`driftlab/probes/`."
    ),
    "reference": "The network as it was before the rewrite.",
    "rewrite": "A change of the code of a network that is meant to keep its function.",
    "round-off": (
        "The error of computing with a limited number of bits; also called rounding. The unit round-off is "
        "the largest relative error of one operation: 2^-24 in float32, 2^-53 in float64."
    ),
    "shadow execution": (
        "Running the float32 code path with every value held in float64. Tensors report float32, and a cast "
        "changes what a tensor reports, not what it holds. Rounding disappears, and a wrong function stays."
    ),
    "sign flip": (
        "A pre-activation whose sign differs between an arm and the arm it is compared with, or another "
        "winner of a max-pool. At such kinks float32 drift grows by several powers of ten within a few steps."
    ),
    "ulp": "Unit in the last place: the distance from a floating-point number to the next one.",
    "verdict": (
        "One of seven words: `bit_identical`, `round_off`, `reduced_precision`, `unstable`, `bug`, "
        "`nondeterministic`, `inconclusive`."
    ),
    "weight distance": (
        "How far the weights of two arms are apart, relative to the weights themselves: the 2-norm of the "
        "difference over the 2-norm of the weights of the arm that is compared with. Gradient distance and "
        "logit distance are taken in the same way."
    ),
    "window": (
        "The first steps of training, in float32 and float64, next to the controls. `diagnose` takes 20 "
        "steps (`steps=`)."
    ),
}


# In results/published/<page>/README.md, below its title.
PUBLISHED_NOTE = (
    "Words with a special meaning, such as *arm*, *control* and *fold*, are explained in the "
    "[glossary](../../../docs/glossary.md)."
)


def anchor(term: str) -> str:
    """What a link to the term ends with: `sign flip` is `#sign-flip`."""
    return term.lower().replace(" ", "-")


def as_markdown() -> str:
    """The file docs/glossary.md."""
    entries = "\n\n".join(f"## {term}\n\n{meaning}" for term, meaning in GLOSSARY.items())
    return (
        "# Glossary\n\nThe words that the documentation, the terminal and the reports use. Each has one "
        f"meaning everywhere.\n\n{entries}\n"
    )


if __name__ == "__main__":
    print(as_markdown(), end="")
