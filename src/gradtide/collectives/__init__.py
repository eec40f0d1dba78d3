"""The averaging algorithms; a new one is one file and one line here."""

from gradtide.collectives.dense import Dense as Dense

COLLECTIVES = (Dense,)
