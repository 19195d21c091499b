"""An operator's policy file → profiles: one of ours, or an `EndpointPickerConfig` document. Edge: reads a file."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from services.router.scheduling.endpoint_picker_config import is_endpoint_picker_config, parse_endpoint_picker_config
from services.router.scheduling.profile import Profile, YamlLoader, parse_profile
from services.router.scheduling.registry import Registry
from shared.errors import ConfigurationError, reason_of


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """What a file says: the profile, and what of it was read over."""

    profile: Profile
    remarks: tuple[str, ...] = ()


def load_profile_file(path: Path, registry: Registry) -> ProfileFile:
    """Raises ConfigurationError, also for a file that can't be read."""
    source = f"profile file {path}"
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: can't be read ({reason_of(error)})") from None
    try:
        document = YamlLoader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{source}: not YAML: {error}") from None
    if not is_endpoint_picker_config(document):
        return ProfileFile(parse_profile(text, source, registry))
    adopted = parse_endpoint_picker_config(text, source, registry)
    return ProfileFile(adopted.profile, adopted.remarks)
