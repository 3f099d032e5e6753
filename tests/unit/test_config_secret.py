"""Detection of secrets in commands, which would appear in plan.json, the log and the process
list."""

from __future__ import annotations

from tests.cases import each
from training.config.secrets import first, problems

CLEAN = [
    'curl -d "$DUET_TEXT" https://ntfy.sh/my-topic',
    'curl -H "Authorization: Bearer $NTFY_TOKEN" -d "$DUET_TEXT" https://ntfy.example.com/runs',
    'curl -H "Authorization: Bearer $(cat ~/.ntfy)" -d "$DUET_TEXT" https://ntfy.sh/x',
    'curl -H "X-Api-Key: ${KEY:?}" https://host/',
    'curl -u "me:$PASSWORD" https://host/',
    "curl https://me:$PASSWORD@host/",
    'curl -d "$(cat)" "$SLACK_WEBHOOK"',
    'curl "https://hooks.slack.com/services/$SLACK"',
    'curl "https://oapi.dingtalk.com/robot/send?access_token=$DINGTALK_TOKEN"',
    'curl "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=$WECOM_KEY"',
    'curl "https://open.feishu.cn/open-apis/bot/v2/hook/$FEISHU_HOOK"',
    "curl https://api.telegram.org/bot$TELEGRAM_TOKEN/sendMessage",
    'mail -s "$DUET_TITLE" me@example.com',
    'notify-send "the key changed now" "$DUET_TEXT"',
    "python ~/tools/post_the_result.py --key-file=/home/me/.key",
    "TOKEN=`cat ~/.token` ~/bin/post",
]
SECRET = [
    'curl -H "Authorization: Bearer tk_geheim1234" https://host/',
    'curl -H "Authorization: Bearer tk_geheim1234$X" https://host/',
    'curl -H "Authorization: Basic geheimgeheim" https://host/',
    "curl https://me:geheim@host/",
    "curl -u me:geheim https://host/",
    "curl -u me:geheim$X https://host/",
    'curl "https://oapi.dingtalk.com/robot/send?access_token=geheim0123456789"',
    'curl "https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key=geheim-4bc4-97a0"',
    "curl https://hooks.slack.com/services/T000/B000/geheimgeheim",
    "curl https://discord.com/api/webhooks/123456789/geheimgeheim",
    "curl https://open.feishu.cn/open-apis/bot/v2/hook/geheim-bbbb-cccc",
    "curl https://api.telegram.org/bot123456:geheimgeheim/sendMessage",
    "curl https://hc-ping.com/aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee",
    "post --token geheim123456 now",
    "post --api-key=geheim123456",
    "curl https://api.day.app/geheimGEHEIM/title",
    "curl https://maker.ifttt.com/trigger/run/with/key/geheim0123",
    "curl --oauth2-bearer geheim0123 https://host/",
    "sshpass -p geheim ssh host",
    "MY_TOKEN=geheim12 post",
    "post " + "a1" * 20,
]


@each("command", CLEAN)
def test_shell_expansions_are_not_secrets(command: str) -> None:
    assert first(command) == ""
    assert problems(command, "default") == []


@each("command", SECRET)
def test_a_secret_is_rejected_and_not_shown(command: str) -> None:
    (problem,) = problems(command, "from --notify on the command line")
    text = "\n".join(problem.lines())
    assert "notify (from --notify on the command line) contains what looks like a secret" in text
    assert "$NTFY_TOKEN" in text and "single quotes" in text
    assert "geheim" not in text and "a1a1" not in text


def test_an_empty_command_is_accepted() -> None:
    assert first("") == ""
