"""The labelled bench: pairs of networks whose relation is known, to count how often a diagnosis is right."""
