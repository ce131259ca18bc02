"""What a config alone can say against learning preferences.

>>> list(problems(load(None, ["dpo.args.gamma=1"])))
['dpo.args.gamma: has no effect with dpo.loss=dpo; remove it']
"""

from __future__ import annotations

from collections.abc import Iterator

from saccade.config import Config
from saccade.plugins.preferences.preference_losses import PREFERENCES, WITHOUT_REFERENCE


def problems(config: Config) -> Iterator[str]:
    dpo = config.dpo
    read = PREFERENCES[dpo.loss].options.keys() - {"beta"}
    for name in sorted(dpo.args.keys() - read):
        known = any(entry.reads(name) for entry in PREFERENCES.values())
        flaw = f"has no effect with dpo.loss={dpo.loss}" if known else "no loss has such an option"
        expected = f", which reads {', '.join(sorted(read))}" if read else ""
        yield f"dpo.args.{name}: {flaw}{expected}; remove it"
    if "reference" in dpo.model_fields_set and dpo.loss in WITHOUT_REFERENCE:
        yield f"dpo.reference: has no effect with dpo.loss={dpo.loss}; remove it"
