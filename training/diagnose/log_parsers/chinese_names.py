"""Names of metrics in Chinese lines, in English: `损失: 0.3 步数: 7` → `loss: 0.3 step: 7`."""

from __future__ import annotations

import re

_NAMES = {
    "总步数": "total steps",
    "总损失": "total loss",
    "训练": "train",
    "验证集": "val",
    "验证": "val",
    "测试集": "test",
    "测试": "test",
    "平均": "average",
    "当前": "current",
    "全局": "global",
    "损失值": "loss",
    "损失": "loss",
    "准确率": "acc",
    "学习率": "lr",
    "迭代次数": "step",
    "迭代步数": "step",
    "迭代数": "step",
    "迭代": "step",
    "步数": "step",
    "步": "step",
    "轮次": "epoch",
    "轮数": "epoch",
    "轮": "epoch",
    "批次": "batch",
    "剩余时间": "eta",
}
_NAME = re.compile("|".join(_NAMES))  # longer ones first
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
# `第 3/10 轮`, `第3轮/共10轮`, `第100步`
_NTH = re.compile(
    r"第 *(?P<number>\d+)(?: */ *(?P<of>\d+))? *(?:个 *)?(?P<what>轮次?|步|次迭代|批次?|epoch|step)"
    r"(?:[ ,，/]*共 *(?P<all>\d+) *(?:轮|步|批)次?)?",
    re.I,
)
_NTHS = {"轮": "epoch", "步": "step", "次": "step", "批": "batch"}  # of the first character
_MARKS = str.maketrans("：，＝（）【】／；", ":,=()[]/;")
_SPACES = re.compile(" {2,}")


def in_english(text: str) -> str:
    """Any other line is unchanged."""
    if not _CHINESE.search(text):
        return text
    text = _NTH.sub(_nth, text.translate(_MARKS))
    text = _NAME.sub(lambda found: f" {_NAMES[found[0]]}", text)
    return _SPACES.sub(" ", text).strip()


def _nth(found: re.Match[str]) -> str:
    of = found["of"] or found["all"]
    name = _NTHS.get(found["what"][0], found["what"])
    return f" {name} {found['number']}" + (f"/{of} " if of else " ")
