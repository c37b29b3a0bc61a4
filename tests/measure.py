"""A measure of gradients' errors that holds for every processor and number of threads.

Sums in another order differ by rounding errors of their terms, however little the terms leave. The gradient of a key's
bias, for one, is zero, since softmax ignores a shift of all its scores: what is found there is rounding error alone.
Weight and bias of one layer are sums over the same terms, so the larger of the two is the measure of both.
"""


def gradient_errors(actual, expected):
    """Return the norm of each gradient's error, relative to the largest gradient in its layer.

    A layer whose gradients are all below a millionth of the whole gradient is measured by that millionth.
    """
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    norms = {name: float(value.double().norm()) for name, value in expected.items()}
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    assert whole > 1e-4, "there is no gradient worth comparing"
    terms = {}
    for name, norm in norms.items():
        layer = name.rpartition(".")[0]
        terms[layer] = max(terms.get(layer, 1e-6 * whole), norm)
    return {
        name: float((actual[name].double() - value.double()).norm())
        / terms[name.rpartition(".")[0]]
        for name, value in expected.items()
    }
