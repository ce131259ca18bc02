"""A teacher: a model that scores the same tokens as the one that learns, for distillation in sft."""

from pathlib import Path

from saccade.config import Config
from saccade.errors import ConfigError
from saccade.models.families import TOWERS, Family, load_family
from saccade.models.files import SERIES_FILE
from saccade.recipes import model_setup
from saccade.trainer.local import LocalBackend


def load_teacher(config: Config, family: Family) -> LocalBackend | None:
    """A model that reads the same tokens and only scores."""
    path = config.sft.teacher
    if path is None:
        return None
    folder = model_setup.model_folder(config, path)
    theirs = load_family(folder, trust_remote_code=config.model.trust_remote_code)
    if family.series is not None and (Path(folder) / SERIES_FILE).is_file():
        theirs = TOWERS["series"].plug(theirs, family.series)
    vocabularies = [each.chat.tokenizer.get_vocab() for each in (family, theirs)]
    alike = theirs.spec.bind is family.spec.bind and theirs.series == family.series
    if not alike or vocabularies[0] != vocabularies[1]:
        raise ConfigError(
            f"sft.teacher={path}: a {theirs.name} with other tokens than the {family.name} that "
            "learns; give a model of the same family and tokenizer, and with an encoder of time "
            "series if that has one"
        )
    return LocalBackend(model_setup.load_policy(config, theirs, train="full"), theirs)
