"""Model folders, model families and the tiny models that are built in place."""

from saccade.models.mend import before_torchvision

before_torchvision()
