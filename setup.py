"The package's metadata, read from settings.ini so that it is written down once."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
extras = {name.removesuffix("_requirements"): cfg[name].split() for name in cfg if name.endswith("_requirements")}

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    keywords=cfg["keywords"].split(),
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Natural Language :: English",
        "Programming Language :: Python :: 3.11",
    ],
    packages=find_packages(include=["kimi_spec", "kimi_spec.*"]),
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require=extras,
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": ["kimi_spec=kimi_spec._modidx:d"],
        # vLLM imports these in every one of its processes before it builds a model
        "vllm.general_plugins": ["kimi_spec_cpu=kimi_spec.patching.vllm_cpu:register", "kimi_spec_patches=kimi_spec.patching.at_import:register"],
    },
    zip_safe=False,
)
