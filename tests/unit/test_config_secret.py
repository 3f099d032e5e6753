"""Which commands would put a secret into plan.json, the log and the list of processes."""

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
    "python ~/tools/tell_everybody_that_a_run_has_ended.py --key-file=/home/me/.key",
    "TOKEN=`cat ~/.token` ~/bin/tell",
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
    "tell --token geheim123456 now",
    "tell --api-key=geheim123456",
    "curl https://api.day.app/geheimGEHEIM/title",
    "curl https://maker.ifttt.com/trigger/run/with/key/geheim0123",
    "curl --oauth2-bearer geheim0123 https://host/",
    "sshpass -p geheim ssh host",
    "MY_TOKEN=geheim12 tell",
    "tell " + "a1" * 20,
]


@each("command", CLEAN)
def test_what_the_shell_fills_in_is_no_secret(command: str) -> None:
    assert first(command) == ""
    assert problems(command, "default") == []


@each("command", SECRET)
def test_a_secret_is_refused_without_being_shown(command: str) -> None:
    (problem,) = problems(command, "from --notify on the command line")
    text = "\n".join(problem.lines())
    assert "notify (from --notify on the command line) holds what looks like a secret" in text
    assert "$NTFY_TOKEN" in text and "single quotes" in text
    assert "geheim" not in text and "a1a1" not in text


def test_nothing_is_asked_of_an_empty_command() -> None:
    assert first("") == ""
