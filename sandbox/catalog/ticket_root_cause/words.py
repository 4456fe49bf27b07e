"""Words of the dialogues, in English and Chinese. ``{product}``, ``{version}`` and ``{component}``
are filled in by tools.py."""

from __future__ import annotations

from typing import Any

WORDS: dict[str, dict[str, Any]] = {
    "en": {
        "customer": "Customer",
        "agent": "Support",
        "products": ("Orbit Mail", "Orbit Drive", "Orbit Meet", "Orbit Pay", "Orbit Notes",
                     "Orbit Maps"),
        "regions": ("north", "south", "east", "west", "islands"),
        "channels": ("chat", "mail", "phone"),
        "greetings": ("Hello, ", "Hi there, ", "Good morning. ", "", "Dear team, "),
        "topics": {
            "login": ("I am thrown out right after signing in.", "the login page comes back again "
                      "and again.", "my password is right but the session ends at once.",
                      "signing in works for two seconds, then I am logged out."),
            "slow": ("everything takes ages to open.", "the app has become terribly slow.",
                     "pages need a minute to load.", "it hangs whenever I scroll."),
            "sync": ("my phone and my laptop show different data.", "changes do not reach my other "
                     "devices.", "synchronisation stops half way.", "yesterday's edits are missing "
                     "on the tablet."),
            "notify": ("no notifications arrive any more.", "alerts come hours late.",
                       "I am not told about new messages.", "reminders stay silent."),
            "payment": ("my card was charged twice.", "the payment fails at the last step.",
                        "the invoice shows the wrong amount.", "the refund never arrived."),
            "upload": ("uploads break off at 99 percent.", "pictures cannot be uploaded.",
                       "attachments are lost on the way.", "sending large files fails."),
            "crash": ("the app closes by itself.", "it crashes when I open the settings.",
                      "a white screen is all I see.", "the window disappears after the start."),
            "search": ("search finds nothing.", "results of the search are outdated.",
                       "the search box answers with an error.", "I cannot find my old entries."),
        },
        "symptoms": {
            "login": "being logged out right after signing in", "slow": "a very slow app",
            "sync": "devices that do not synchronise", "notify": "missing or late notifications",
            "payment": "wrong or failing payments", "upload": "uploads that fail",
            "crash": "crashes", "search": "a search that finds nothing",
        },
        "questions": ("Sorry to hear that. Since when does it happen?",
                      "Thank you for writing. Which version of {product} is it?",
                      "Could you tell me what you see exactly?",
                      "I will look into it. Did you restart the device?"),
        "details": ("It began this week, I use {version}.", "Restarting did not help.",
                    "A colleague has no trouble with it.", "I use {product} {version} at work.",
                    "It happens on wireless and on cable.", "I have cleared everything already."),
        "replies": ("Please install the update and try again.", "I have passed it on to the team.",
                    "Please clear the cache and sign in again.", "We will write when we know more.",
                    "A reset of the settings often helps.", "I have opened a case for you."),
        "findings": ("Engineering confirmed the cause: it is the {component}.",
                     "Our engineers traced this to the {component}; a fix is on its way.",
                     "The root cause has been found in the {component}."),
        "rumours": ("We first suspected the {component}, but engineering has ruled it out.",
                    "It is not the {component}, as was said; engineering goes on looking.",
                    "The {component} was under suspicion, which turned out to be wrong."),
        "closings": ("Thank you.", "All right, I will wait.", "That did not help, sorry.",
                     "Thanks, good bye.", "Please hurry, I need it for work."),
        "components": ("session cache", "name resolver", "push gateway", "license server",
                       "image resizer", "payment router", "tls proxy", "sync queue",
                       "geo index", "quota service"),
        "instruction": "The tools search 100,000 support dialogues. Since {since} more customers "
        "of {product} than usual complain about {symptom}. Find the version they have in common "
        "and the component that engineering confirmed as the cause for it. Reply with the version "
        "and the component only, for example: 4.2.1 session cache",
    },
    "zh": {
        "customer": "客户",
        "agent": "客服",
        "products": ("星轨邮箱", "星轨网盘", "星轨会议", "星轨支付", "星轨笔记", "星轨地图"),
        "regions": ("华北", "华东", "华南", "西南", "东北"),
        "channels": ("在线", "邮件", "电话"),
        "greetings": ("你好，", "您好，", "早上好，", "", "客服您好，"),
        "topics": {
            "login": ("登录之后马上就被退出。", "登录页面反复出现。", "密码没错，但会话立刻失效。",
                      "刚登录两秒就掉线了。"),
            "slow": ("打开什么都要等很久。", "软件变得特别卡。", "页面要一分钟才能加载出来。",
                     "一滑动就没有反应。"),
            "sync": ("手机和电脑上的数据不一样。", "修改的内容同步不到其他设备。",
                "同步到一半就停了。",
                     "昨天的修改在平板上看不到。"),
            "notify": ("收不到任何通知。", "提醒晚了几个小时才到。", "有新消息也不提示。",
                       "提醒一直没有声音。"),
            "payment": ("银行卡被扣了两次钱。", "付款到最后一步失败。", "账单金额不对。",
                        "退款一直没有到账。"),
            "upload": ("上传到百分之九十九就中断。", "图片传不上去。", "附件在发送途中丢失。",
                       "发送大文件总是失败。"),
            "crash": ("软件自己就关闭了。", "一打开设置就闪退。", "只能看到一片白屏。",
                      "启动之后窗口就消失了。"),
            "search": ("搜索什么都找不到。", "搜索结果是旧的。", "搜索框一直报错。",
                       "找不到以前的记录。"),
        },
        "symptoms": {
            "login": "登录后立即被退出", "slow": "软件非常卡顿", "sync": "设备之间无法同步",
            "notify": "通知缺失或延迟", "payment": "付款错误或失败", "upload": "上传失败",
            "crash": "软件崩溃闪退", "search": "搜索不到内容",
        },
        "questions": ("很抱歉给您带来不便，请问从什么时候开始的？",
            "感谢反馈，请问{product}是哪个版本？",
                      "请您描述一下具体看到的内容。", "我来查看一下，请问重启过设备吗？"),
        "details": ("这周开始的，我用的是{version}。", "重启也没有用。", "同事那边一切正常。",
                    "我在公司用{product} {version}。", "无线和有线网络都一样。",
                    "缓存已经清理过了。"),
        "replies": ("请安装更新之后再试一次。", "已经转给相关团队处理。", "请清理缓存后重新登录。",
                    "有进展会第一时间通知您。", "恢复默认设置一般可以解决。", "已经为您登记工单。"),
        "findings": ("工程师已经确认原因：是{component}的问题。",
                     "工程师定位到{component}，修复正在发布。",
                     "根本原因已经查明，出在{component}。"),
        "rumours": ("起初怀疑是{component}，工程师已经排除。",
                    "并不是昨天所说的{component}，工程师还在排查。",
                    "之前怀疑{component}，后来证明不对。"),
        "closings": ("谢谢。", "好的，我等消息。", "还是不行。", "谢谢，再见。",
            "请尽快，工作要用。"),
        "components": ("会话缓存", "域名解析服务", "推送网关", "许可证服务", "图片缩放服务",
                       "支付路由", "加密代理", "同步队列", "地理索引", "配额服务"),
        "instruction": "可以用工具检索十万条客服对话。从{since}起，"
        "{product}有更多客户反映{symptom}。"
        "请找出这些客户共同的版本，以及工程师确认的、造成该问题的组件。"
        "只回答版本和组件，例如：4.2.1 会话缓存",
    },
}  # fmt: skip

SEARCH = {"en": "engineering confirmed", "zh": "工程师 确认"}
"""Words of one of the findings, for the oracle."""
