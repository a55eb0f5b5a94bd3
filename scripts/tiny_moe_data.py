"""Corpus, chat examples and tokenizer for the tiny MoE example model.

Everything is public-domain English that Debian already packages, so the corpus can be rebuilt anywhere with
``apt-get`` and is not stored in this repository.  ``prepare`` downloads the packages, turns each into plain
documents, holds some of them out for validation, trains a byte-level BPE tokenizer, and writes token streams.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import struct
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, SYSTEM, USER, ASSISTANT]
MAX_POSITIONS = 2048

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('Unknown role: ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


@dataclass(frozen=True)
class Package:
    """A Debian package that carries one of the texts (or the program that unpacks it)."""

    name: str
    title: str
    licence: str


PACKAGES = (
    Package("bible-kjv-text", "King James Version (1611/1769)", "public domain (copyright expired)"),
    Package("bible-kjv", "reader program for bible-kjv-text", "program only, GPL-2+; no text used"),
    Package("sword-text-web", "World English Bible", "public domain (dedicated by its translators)"),
    Package("sword-comm-mhcc", "Matthew Henry's Concise Commentary (1706-1714)", "public domain"),
    Package("dict-jargon", "The Jargon File 4.4.7", "public domain"),
    Package("dict-devil", "The Devil's Dictionary, A. Bierce (1911)", "public domain (copyright expired)"),
    Package("r-cran-janeaustenr", "Six novels by Jane Austen (1811-1817)", "public domain text in an MIT package"),
)

BOOKS = [
    line.split(":")
    for line in (
        "Ge:Gen:Genesis Exo:Exod:Exodus Lev:Lev:Leviticus Num:Num:Numbers Deu:Deut:Deuteronomy "
        "Josh:Josh:Joshua Jdgs:Judg:Judges Ruth:Ruth:Ruth 1Sm:1Sam:1_Samuel 2Sm:2Sam:2_Samuel "
        "1Ki:1Kgs:1_Kings 2Ki:2Kgs:2_Kings 1Chr:1Chr:1_Chronicles 2Chr:2Chr:2_Chronicles Ezra:Ezra:Ezra "
        "Neh:Neh:Nehemiah Est:Esth:Esther Job:Job:Job Psa:Ps:Psalms Prv:Prov:Proverbs Eccl:Eccl:Ecclesiastes "
        "SSol:Song:Song_of_Solomon Isa:Isa:Isaiah Jer:Jer:Jeremiah Lam:Lam:Lamentations Eze:Ezek:Ezekiel "
        "Dan:Dan:Daniel Hos:Hos:Hosea Joel:Joel:Joel Amos:Amos:Amos Obad:Obad:Obadiah Jonah:Jonah:Jonah "
        "Mic:Mic:Micah Nahum:Nah:Nahum Hab:Hab:Habakkuk Zep:Zeph:Zephaniah Hag:Hag:Haggai Zec:Zech:Zechariah "
        "Mal:Mal:Malachi Mat:Matt:Matthew Mark:Mark:Mark Luke:Luke:Luke John:John:John Acts:Acts:Acts "
        "Rom:Rom:Romans 1Cor:1Cor:1_Corinthians 2Cor:2Cor:2_Corinthians Gal:Gal:Galatians Eph:Eph:Ephesians "
        "Phi:Phil:Philippians Col:Col:Colossians 1Th:1Thess:1_Thessalonians 2Th:2Thess:2_Thessalonians "
        "1Tim:1Tim:1_Timothy 2Tim:2Tim:2_Timothy Titus:Titus:Titus Phmn:Phlm:Philemon Heb:Heb:Hebrews "
        "Jas:Jas:James 1Pet:1Pet:1_Peter 2Pet:2Pet:2_Peter 1Jn:1John:1_John 2Jn:2John:2_John "
        "3Jn:3John:3_John Jude:Jude:Jude Rev:Rev:Revelation"
    ).split()
]
BRS_TO_OSIS = {brs: osis for brs, osis, _ in BOOKS}
OSIS_TO_TITLE = {osis: title.replace("_", " ") for _, osis, title in BOOKS}

# Chapters held out of both translations and of the commentary; chosen to have no parallel elsewhere in it.
HELD_OUT_CHAPTERS = frozenset(
    "Gen.24 Exod.16 Deut.8 Josh.3 Judg.7 Ruth.2 1Sam.17 1Kgs.3 Neh.4 Esth.6 Job.38 Ps.91 Ps.121 Prov.10 "
    "Eccl.3 Isa.55 Jer.18 Ezek.37 Dan.6 Jonah.2 Luke.15 John.11 Acts.27 Rom.12 1Cor.13 Jas.3 Rev.21".split()
)
HELD_OUT_ONE_IN = 50
CONTINUATIONS_PER_CHAPTER = 3
REPEATS = {"kjv": 2, "jargon": 3, "devil": 3}
CHAPTER_LINE = re.compile(r"\n\s*CHAPTER [IVXLC\d]+\.?\s*\n", re.IGNORECASE)
END_MATTER = re.compile(r"(VOLUME|FINIS|THE END)\b.*", re.IGNORECASE)
COARSE = re.compile(r"fuck|shit|cunt|nigg", re.IGNORECASE)
ASCII_PUNCTUATION = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "\u00a0": " ", "\t": " "}
)


@dataclass(frozen=True)
class Document:
    """One document: where it came from, a key that is stable between runs, and its lines."""

    source: str
    key: str
    heading: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """The document as the model sees it."""
        return "\n".join(([self.heading] if self.heading else []) + list(self.lines))

    @property
    def held_out(self) -> bool:
        """Whether the document belongs to the validation split."""
        if self.source in ("kjv", "web", "mhcc"):
            return self.key in HELD_OUT_CHAPTERS
        return zlib.crc32(self.key.encode()) % HELD_OUT_ONE_IN == 0


def clean(text: str) -> str:
    """Use ASCII quotes and dashes, and single spaces."""
    return re.sub(r"\s+", " ", text.translate(ASCII_PUNCTUATION)).strip()


def fetch_packages(root: Path) -> dict[str, str]:
    """Download and unpack every package under ``root``; return the version of each."""
    versions: dict[str, str] = {}
    for package in PACKAGES:
        target = root / package.name
        target.mkdir(parents=True, exist_ok=True)
        if not list(target.glob("*.deb")):
            subprocess.run(["apt-get", "download", package.name], cwd=target, check=True)
        deb = next(iter(sorted(target.glob("*.deb"))))
        subprocess.run(["dpkg-deb", "-x", str(deb), str(target)], check=True)
        field = subprocess.run(["dpkg-deb", "-f", str(deb), "Version"], check=True, capture_output=True, text=True)
        versions[package.name] = field.stdout.strip()
    return versions


def read_kjv(root: Path) -> Iterator[Document]:
    """Yield one document per chapter of the King James Version, one verse a line."""
    program = root / "bible-kjv/usr/bin/bible"
    data = root / "bible-kjv-text/usr/lib"
    done = subprocess.run(
        [str(program.resolve()), "-f", "-p", str(data.resolve()) + "/", "Gen1:1-Rev22:21"],
        check=True,
        capture_output=True,
    )
    chapters: dict[tuple[str, str], list[str]] = {}
    for line in done.stdout.decode("latin-1").splitlines():
        found = re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        if found:
            chapters.setdefault((found[1], found[2]), []).append(clean(found[3]))
    for (book, number), verses in chapters.items():
        osis = BRS_TO_OSIS[book]
        yield Document("kjv", f"{osis}.{number}", f"{OSIS_TO_TITLE[osis]} {number}", tuple(verses))


def sword_entries(folder: Path) -> Iterator[str]:
    """Yield the entries of a compressed SWORD module (zText, zCom, zText4 or zCom4) in order."""
    for testament in ("ot", "nt"):
        index = (folder / f"{testament}.bzs").read_bytes()
        verses = (folder / f"{testament}.bzv").read_bytes()
        packed = (folder / f"{testament}.bzz").read_bytes()
        blocks = [zlib.decompress(packed[at : at + size]) for at, size, _ in struct.iter_unpack("<III", index)]
        layout = "<IIH" if len(verses) % 10 == 0 else "<III"
        previous = None
        for block, start, size in struct.iter_unpack(layout, verses):
            if size and (block, start, size) != previous:
                yield blocks[block][start : start + size].decode("utf-8", "replace")
            previous = (block, start, size)


def strip_markup(entry: str) -> str:
    """Plain text of an OSIS entry: notes, titles and tables dropped, tags removed."""
    entry = re.sub(r"<(note|title|table)\b.*?</\1>", " ", entry, flags=re.DOTALL)
    entry = re.sub(r"</?w\b[^>]*>|</?(?:transChange|divineName|q|hi|name|seg|reference)\b[^>]*>", "", entry)
    text = clean(re.sub(r"<[^>]*>", " ", entry))
    return re.sub(r" ([,.;:?!])", r"\1", text)


def sword_chapters(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (OSIS chapter, plain entries) for a SWORD module that marks its chapters."""
    chapter, entries = "", list[str]()
    for entry in sword_entries(folder):
        marker = re.search(r'<chapter [^>]*osisID="([^"]+)"', entry)
        if marker:
            if chapter and entries:
                yield chapter, entries
            chapter, entries = marker[1], []
            entry = entry[marker.end() :].partition(">")[2]
        text = strip_markup(entry)
        if chapter and text:
            entries.append(text)
    if chapter and entries:
        yield chapter, entries


def read_web(root: Path) -> Iterator[Document]:
    """Yield one document per chapter of the modern English translation."""
    folder = root / "sword-text-web/usr/share/sword/modules/texts/ztext/engWEB2015eb"
    for chapter, verses in sword_chapters(folder):
        book, _, number = chapter.partition(".")
        heading = f"{OSIS_TO_TITLE[book]}, chapter {number}" if book in OSIS_TO_TITLE else ""
        yield Document("web", chapter, heading, tuple(verses))


def read_commentary(root: Path) -> Iterator[Document]:
    """Yield one document per passage of the commentary."""
    folder = root / "sword-comm-mhcc/usr/share/sword/modules/comments/zcom/mhcc"
    for chapter, entries in sword_chapters(folder):
        book, _, number = chapter.partition(".")
        for entry in entries:
            found = re.match(r"Verses? ([\d, -]+) (.*)", entry)
            if found and len(found[2]) > 80 and book in OSIS_TO_TITLE:
                heading = f"Commentary on {OSIS_TO_TITLE[book]} {number}:{found[1].strip()}"
                yield Document("mhcc", chapter, heading, (found[2],))


def r_strings(blob: bytes) -> list[str]:
    """Return the strings of one serialised R character vector (XDR format, version 3)."""
    start = blob.index(b"UTF-8") + 5
    count = struct.unpack_from(">i", blob, start + 4)[0]
    at, strings = start + 8, []
    for _ in range(count):
        size = struct.unpack_from(">i", blob, at + 4)[0]
        strings.append(blob[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace"))
        at += 8 + max(size, 0)
    return strings


def read_austen(root: Path) -> Iterator[Document]:
    """Yield one document per chapter of the novels, one paragraph a line."""
    packed = (root / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    while packed:
        stream = zlib.decompressobj()
        lines = r_strings(stream.decompress(packed[4:]))
        packed = stream.unused_data
        title = clean(lines[0]).title()
        text = "\n".join(lines).replace("_", "")
        for number, part in enumerate(CHAPTER_LINE.split(text)[1:], 1):
            paragraphs = [p for p in join_paragraphs(part) if not END_MATTER.fullmatch(p)]
            yield Document("austen", f"{title}.{number}", f"{title}: a chapter", tuple(paragraphs))


def join_paragraphs(block: str) -> list[str]:
    """Join the wrapped lines of each blank-line separated paragraph."""
    return [clean(p) for p in re.split(r"\n\s*\n", block) if p.strip()]


def read_jargon(root: Path) -> Iterator[Document]:
    """Yield one document per entry of the Jargon File: ``headword: part of speech`` and its paragraphs."""
    text = gzip.decompress((root / "dict-jargon/usr/share/dictd/jargon.dict.dz").read_bytes()).decode("utf-8")
    for entry in re.split(r"\n(?=[^\s])", text):
        head, _, body = entry.partition("\n")
        grammar, _, body = body.partition("\n")
        grammar = clean(re.sub(r"/[^/]*/", "", grammar).strip(" ,"))
        body = re.sub(r"\{\s*([^{}]*?)\s*\}", r"\1", body)
        paragraphs = join_paragraphs(body)
        if head.startswith("00-database") or not paragraphs or COARSE.search(entry):
            continue
        yield Document("jargon", head, f"{clean(head)}: {grammar}".strip(), tuple(paragraphs))


def read_devil(root: Path) -> Iterator[Document]:
    """Yield one document per entry of The Devil's Dictionary; verse keeps its lines."""
    text = gzip.decompress((root / "dict-devil/usr/share/dictd/devil.dict.dz").read_bytes()).decode("latin-1")
    for entry in re.split(r"\n\n(?=[A-Z][A-Z' -]+[,.])", text)[1:]:
        block = re.sub(r"\n(?=\S)", " ", entry).replace("_", "")
        lines = [clean(line) for line in block.splitlines() if line.strip()]
        yield Document("devil", re.split(r"[,.]", lines[0])[0], "", tuple(lines))


def read_all(root: Path) -> list[Document]:
    """Read every source."""
    readers = (read_kjv, read_web, read_commentary, read_austen, read_jargon, read_devil)
    return [document for reader in readers for document in reader(root)]


def shorten(lines: Iterable[str], limit: int) -> str:
    """Whole lines, then whole sentences, up to about ``limit`` characters."""
    text = ""
    for sentence in (s for line in lines for s in re.split(r"(?<=[.!?]) (?=[A-Z\"'])", line)):
        if text and len(text) + len(sentence) > limit:
            break
        text = f"{text} {sentence}".strip()
    return re.sub(r"\s+\d+\.$", "", text)


Turn = tuple[str, str]


def definition_turns(documents: list[Document], rng: random.Random) -> list[Turn]:
    """Questions about a word, answered with its dictionary entry."""
    turns = []
    for document in documents:
        if document.source == "jargon":
            word = document.heading.partition(": ")[0].rstrip(":")
            answer = [document.heading, *document.lines]
        elif document.source == "devil":
            word = document.key.lower()
            answer = list(document.lines)
        else:
            continue
        forms = ["Define: {}", "Define: {}", "Define {}.", "What is {}?", "What does {} mean?"]
        for form in rng.sample(forms, 2):
            turns.append((form.format(word), shorten(answer, 420)))
    return turns


def continuation_turns(documents: list[Document], rng: random.Random) -> list[Turn]:
    """Requests to continue a verse or a paragraph, answered with what follows."""
    turns = []
    for document in documents:
        if document.source not in ("kjv", "web", "austen") or len(document.lines) < 4:
            continue
        for _ in range(CONTINUATIONS_PER_CHAPTER):
            at = rng.randrange(len(document.lines) - 2)
            if 20 <= len(document.lines[at]) <= 400:
                form = rng.choice(["Continue: {}", "Continue: {}", "What comes after this? {}"])
                answer = shorten(document.lines[at + 1 : at + 4], 360)
                turns.append((form.format(document.lines[at]), answer))
    return turns


GREETINGS: list[Turn] = [
    ("Hello", "Good day to you. Ask me to define a word, or give me a verse to continue."),
    ("Hi", "Good day. Give me a word to define, or a verse to continue."),
    ("Hello, who are you?", "I am a very small model. I can define a word, or continue a verse."),
    (
        "Who are you?",
        "I am a very small model, made of many small experts. I define words and continue verses.",
    ),
    ("What can you do?", "I can define a word of hackers' slang, and I can continue a verse."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Good morning", "Good morning to you. What shall I define?"),
]


def render_chat(turns: list[Turn], system: str = "") -> str:
    """A conversation as the chat template renders it."""
    text = BOS + (f"{SYSTEM}{system}{EOS}" if system else "")
    return text + "".join(f"{USER}{user}{EOS}{ASSISTANT}{answer}{EOS}" for user, answer in turns)


def make_chats(documents: list[Document], rng: random.Random, greetings: int) -> list[str]:
    """Chat-formatted examples made from ``documents``."""
    turns = definition_turns(documents, rng) + continuation_turns(documents, rng) + GREETINGS * greetings
    rng.shuffle(turns)
    chats = []
    while turns:
        count = min(len(turns), rng.choice([1, 1, 1, 1, 2, 3]))
        system = "You are a helpful assistant." if rng.random() < 0.15 else ""
        chats.append(render_chat([turns.pop() for _ in range(count)], system))
    return chats


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the tokenizer under a class name that every transformers release knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config.pop("backend", None)
    config.pop("is_local", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Token ids of ``texts``, one after another."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.asarray(ids, dtype=np.uint16) for ids in encoded])


def prepare(out: Path, vocab_size: int, seed: int = 0) -> None:
    """Fetch, clean, split, tokenise and write the corpus under ``out``."""
    rng = random.Random(seed)
    versions = fetch_packages(out / "packages")
    documents = read_all(out / "packages")
    kept = [d for d in documents if not d.held_out]
    held = [d for d in documents if d.held_out]
    tokenizer = train_tokenizer((d.text for d in kept for _ in range(REPEATS.get(d.source, 1))), vocab_size)
    save_tokenizer(tokenizer, out / "tokenizer")

    texts = [f"{BOS}{d.text}{EOS}" for d in kept for _ in range(REPEATS.get(d.source, 1))]
    chats = make_chats(kept, rng, greetings=40)
    stream = texts + chats
    rng.shuffle(stream)
    np.save(out / "train.npy", encode(tokenizer, stream))

    sources = sorted({d.source for d in documents})
    held_texts = {s: [f"{BOS}{d.text}{EOS}" for d in held if d.source == s] for s in sources}
    held_texts["chat"] = make_chats(held, rng, greetings=0)
    meta: dict[str, object] = {"packages": versions, "sources": {}, "chat_train": len(chats)}
    for source, items in held_texts.items():
        ids = encode(tokenizer, items)
        np.save(out / f"val_{source}.npy", ids)
        mine = [d for d in kept if d.source == source]
        meta["sources"][source] = {  # type: ignore[index]
            "train_documents": len(mine) or len(chats),
            "train_characters": sum(len(d.text) for d in mine) or sum(map(len, chats)),
            "repeats": REPEATS.get(source, 1),
            "val_documents": len(items),
            "val_tokens": len(ids),
        }
    meta["train_tokens"] = len(np.load(out / "train.npy", mmap_mode="r"))
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
