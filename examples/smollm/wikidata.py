"""The task ``wikidata`` as a plug-in: relations of people, places and things, read as ``country_facts`` reads names.

selfcal generate --plugins examples/smollm/wikidata.py --task wikidata --model MODEL --store_dir samples
"""

from country_facts import DATA, SPLITS, CountryFacts

from selfcal_lightning.data.tasks.dataset import DatasetTask, bare_question
from selfcal_lightning.data.tasks.registry import register_task
from selfcal_lightning.data.tasks.rows import FileSource


class Wikidata(CountryFacts):
    """Short answers from Wikidata; see ``data/wikidata/README.md`` for source and licence."""

    name = "wikidata"
    source = FileSource({split: str(DATA / "wikidata" / f"{split}.jsonl") for split in (*SPLITS, "confirmation")})


register_task(DatasetTask(Wikidata(), prompt=bare_question))
